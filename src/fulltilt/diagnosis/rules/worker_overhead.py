"""What workers cost besides fetching: handing batches over, starting anew, a copy of the data set, shared memory."""

from __future__ import annotations

import math

from fulltilt.diagnosis.evidence import Evidence, training_loaders
from fulltilt.diagnosis.findings import (
    Judgement,
    Severity,
    at,
    found,
    hung_fetch,
    made_for_each_pass,
    rewritten,
    time_spent,
    waiting_for_data,
)
from fulltilt.diagnosis.libraries import keeps_workers
from fulltilt.diagnosis.loader_bottleneck import Bottleneck, Supply
from fulltilt.diagnosis.predicted_gain import amdahl, by_removing, gain
from fulltilt.diagnosis.rules.worker_count import gain_without_wait, workers_unmeasured
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import count, number, percent, seconds, size, whole
from fulltilt.records import Abstention, Finding, LoaderRecord

# --------------------------------------------------------------------------- handing over


def input_handover(evidence: Evidence) -> Judgement:
    """The workers are fast enough, but their batches arrive late: pickling, shared memory, rebuilding, pinning."""
    if evidence.bottleneck is Bottleneck.UNKNOWN:
        return workers_unmeasured(evidence, "input_handover")
    loader, supply = evidence.loader, evidence.supply
    if evidence.bottleneck is not Bottleneck.HANDOVER or loader is None or supply is None:
        return None
    if hung := hung_fetch(evidence, loader, "input_handover"):
        return hung
    facts = [
        f"{count('worker', supply.workers)} could give {number(supply.workers * supply.worker_samples_per_s)} "
        f"samples/s; idle {percent(supply.idle_share)} of their time",
        f"handing over takes {percent(supply.handover_main_share)} of the training thread's wait and "
        f"{percent(supply.handover_worker_share)} of the workers' time",
    ]
    if loader.batch_bytes:
        number_of = loader.batch_tensors or 0
        tensors = f", in {count('tensor', number_of)}" if number_of > 1 else ""
        facts.append(f"a batch has {size(loader.batch_bytes)} ({loader.batch_kind or 'of unknown type'}{tensors})")
    promised = gain_without_wait(evidence)
    fix, without_workers = _lighter_handover(evidence, loader, supply)
    if without_workers and evidence.crowded_by_workers:
        # Without workers compute has their CPUs as well: how fast it then is was not measured.
        alone_s = (supply.fetch_s - supply.queue_s) * loader.batches
        promised = gain(promised[0], max(promised[1], amdahl(evidence.share(evidence.drawing_s - alone_s))))
    if (many := _many_tensors(loader)) is not None:
        fix = f"{many} {fix}" if without_workers else many
    elif fix is None:
        # At most their idle time is to win, and nothing if every worker gets its share of slow batches.
        fix, promised = _sooner_batches(evidence, loader), gain(1.0, amdahl(supply.idle_share), cap=promised[1])
    return waiting_for_data(evidence, "input_handover", facts, fix, loader.where, promised)


def _many_tensors(loader: LoaderRecord) -> str | None:
    """What to do where default_collate makes very many tensors of each batch; None where it does not."""
    tensors = loader.batch_tensors or 0
    if loader.collate != "default_collate" or tensors < THRESHOLDS.many_tensors:
        return None
    return (
        f"default_collate makes {whole(tensors)} tensors of a batch{at(loader.where)}, one for each "
        "position of a list (or field of a dict) in a sample: let __getitem__ return one tensor (torch.tensor(row))."
    )


def _lighter_handover(evidence: Evidence, loader: LoaderRecord, supply: Supply) -> tuple[str | None, bool]:
    """How to make the hand-over cheaper, None where it costs hardly anything; and whether by having no workers."""
    costly = max(supply.handover_main_share, supply.handover_worker_share) >= THRESHOLDS.handover_share / 2
    collate = loader.collate or "the collate function"
    wait_s = loader.wait_s / loader.batches
    alone_s = supply.fetch_s - supply.queue_s
    if costly and not passes_through_shm(loader):
        return (
            f"Let {collate}{at(loader.where)} return tensors (torch.from_numpy, torch.stack): they pass through shared "
            "memory; everything else is pickled, sent through a pipe and rebuilt."
        ), False
    if alone_s <= THRESHOLDS.cheap_fetch_share * wait_s:
        alone = f"fetching a batch takes {seconds(alone_s)}, waiting for a worker's {seconds(wait_s)}"
        return f"Fetch without workers: {rewritten(evidence, loader, num_workers=0)}{at(loader.where)}; {alone}.", True
    if costly:
        return (
            f"Send fewer and smaller tensors{at(loader.where)}: only the fields that the training uses, stacked by "
            f"{collate}, in the smallest type that holds them, converted after the batch has arrived."
        ), False
    return None, False


def _sooner_batches(evidence: Evidence, loader: LoaderRecord) -> str:
    """Batches come in order: while a slow one is missing, the others wait in the queue, and then the workers do."""
    fix = "Some batches take long, and since batches come in order, the workers then wait for them. "
    prefetch = loader.prefetch_factor or 2
    if prefetch < THRESHOLDS.deep_queue:
        deeper = rewritten(evidence, loader, prefetch_factor=2 * prefetch)
        fix += f"Raise prefetch_factor {prefetch} → {2 * prefetch}{at(loader.where)}: {deeper}. "
    if loader.made_by is None and "in_order" not in loader.given:
        return f"{fix}Or take batches as soon as they are ready, in an order that differs each time: in_order=False."
    return f"{fix}Or make the slowest samples cheaper."


# --------------------------------------------------------------------------- epoch restarts


def epoch_restart(evidence: Evidence) -> Judgement:
    """Each pass over the data begins with starting workers and filling an empty queue."""
    cost_s = evidence.buckets.epoch_turnover_s
    share = evidence.share(cost_s)
    if share < THRESHOLDS.epoch_restart_share:
        return None
    loader = max(training_loaders(evidence.rank), key=lambda loader: (loader.restart_s, loader.passes), default=None)
    if loader is None:
        return Abstention("epoch_restart", "the DataLoader that is restarted")
    if loader.passes < 2:
        return None  # the workers of its only pass were stopped: nothing restarts
    facts = [
        time_spent(evidence, "restarting the loader for each epoch", cost_s),
        f"{loader.passes} passes, {seconds(cost_s / (loader.passes - 1))} for each new one",
    ]
    filling_s = min(_filling_s(evidence, loader) * (loader.passes - 1), cost_s)
    if filling_s >= THRESHOLDS.recovered_low * cost_s:
        return _slow_first_batch(evidence, loader, cost_s, filling_s, facts)
    made_anew, keeps = made_for_each_pass(loader), keeps_workers(loader)
    if loader.num_workers > 0 and keeps and (made_anew or not loader.persistent_workers):
        why = f"the DataLoader is made {loader.constructed} times" if made_anew else "persistent_workers=False"
        workers = "its worker is" if loader.num_workers == 1 else f"its {loader.num_workers} workers are"
        facts.append(f"{workers} started anew for each pass ({why})")
        call = rewritten(evidence, loader, persistent_workers=True)
        fix = f"Keep the workers alive{at(loader.where)}: {call}."
        if loader.start_method == "spawn":
            fix += " They are spawned, so each start imports the script and its modules again."
    elif loader.iterable:
        fix = (
            f"Make fewer, longer passes{at(loader.where)}: let {loader.dataset} go through the data several times "
            "(for k in range(n) in __iter__; repeat() of datasets and WebDataset)."
        )
    else:
        fix = (
            f"Make fewer, longer passes{at(loader.where)}: RandomSampler(dataset, num_samples=k * len(dataset), "
            "replacement=False) goes k times through the data in one pass."
        )
        if not keeps and not loader.persistent_workers:
            fix = f"{loader.made_by} has no setting that keeps workers between passes. {fix}"
    low, high = by_removing(share)
    if loader.batches <= loader.passes * loader.num_workers * (loader.prefetch_factor or 2):
        # All batches of such a short pass are requested at its start: waiting for them is part of the restart.
        high = amdahl(share + evidence.data_wait_share)
    return found(evidence, "epoch_restart", cost_s, facts, fix, loader.where, gain(low, high))


def _filling_s(evidence: Evidence, loader: LoaderRecord) -> float:
    """How much longer an iterable data set takes for the first batch of a pass than for others, in its worker.

    Workers that start anew also open the files of a data set with indices: those that stay would not.
    """
    work = next((work for work in evidence.rank.workers if work.loader_id == loader.loader_id), None)
    if not loader.iterable or work is None or not work.first_batches or work.first_fetch_s is None:
        return 0.0
    others = work.batches - work.first_batches
    later_s = (work.fetch_s - work.first_fetch_s) / others if others > 0 else 0.0
    return max(work.first_fetch_s / work.first_batches - later_s, 0.0)


def _slow_first_batch(
    evidence: Evidence, loader: LoaderRecord, cost_s: float, filling_s: float, facts: list[str]
) -> Finding:
    """A data set that does much in each pass before it gives its first sample, as a shuffle buffer does."""
    facts.append(
        f"of it, {seconds(filling_s / (loader.passes - 1))} a pass is {loader.dataset} making its first batch, beyond "
        "a later one: for example a shuffle buffer that is filled anew"
    )
    fix = (
        f"Let {loader.dataset} give its first sample of a pass sooner{at(loader.where)}: a smaller shuffle buffer "
        "(buffer_size=), or one that gives samples while it fills. Or go through the data several times in one pass "
        "(for k in range(n) in __iter__; repeat() of datasets and WebDataset)."
    )
    if not loader.persistent_workers:
        fix += (
            " persistent_workers=True saves none of it, unless the data set keeps what it has made for the next pass."
        )
    work = next(work for work in evidence.rank.workers if work.loader_id == loader.loader_id)
    # What fills the buffer has to be made all the same, and goes on beside the training only as fast as workers can.
    cap = evidence.active_s * max(loader.num_workers, 1) / max(work.fetch_s - (work.cpu_wait_s or 0.0), 1e-9)
    predicted = gain(1.0, amdahl(evidence.share(filling_s)), cap=max(cap, 1.0))
    title = "Data loading: slow first batch of each pass"
    return found(evidence, "epoch_restart", cost_s, facts, fix, loader.where, predicted, title=title)


def dataset_pickled(evidence: Evidence) -> Judgement:
    """Workers that are not forked each get a pickled copy of the data set, at every start."""
    loader = max(training_loaders(evidence.rank), key=lambda loader: loader.pickle_s, default=None)
    if loader is None or not loader.pickled_workers or loader.pickled_bytes < THRESHOLDS.pickled_bytes:
        return None
    starts = max(round(loader.pickled_workers / max(loader.num_workers, 1)), 1)
    # The first start is part of start-up; only the later ones stop the training.
    cost_s = min(loader.pickle_s * (starts - 1) / starts, evidence.buckets.epoch_turnover_s)
    share = evidence.share(cost_s)
    if share < THRESHOLDS.epoch_restart_share and loader.pickle_s / starts < THRESHOLDS.pickling_start_s:
        return None
    facts = [
        f"{size(loader.pickled_bytes)} are pickled for each of {count('worker', loader.num_workers)} "
        f"({loader.start_method or 'spawn or forkserver'}): "
        f"{seconds(loader.pickle_s / starts)} at each of {count('start', starts)}; unpickling comes on top",
    ]
    if loader.objects:
        facts.append(f"the data set {loader.dataset} keeps Python objects: {loader.objects}")
    fix = (
        f"Keep the data set{at(loader.where)} small: open files in the first __getitem__, and keep large parts in "
        "tensors (they pass through shared memory), in numpy.memmap or in Arrow files."
    )
    if starts > 1:
        fix += f" And start the workers once: {rewritten(evidence, loader, persistent_workers=True)}."
    else:
        fix += ' Or fork the workers, which pickles nothing: multiprocessing_context="fork".'
    return found(evidence, "dataset_pickled", cost_s, facts, fix, loader.where, by_removing(share))


# --------------------------------------------------------------------------- shared memory


def shm_small(evidence: Evidence) -> Judgement:
    """The batches that the workers keep ready do not fit into /dev/shm: a worker dies with a bus error."""
    loader, total = evidence.loader, evidence.machine.shm_total_bytes
    if loader is None or loader.num_workers == 0 or not passes_through_shm(loader):
        return None
    if loader.batch_bytes is None:
        return Abstention("shm_small", "the size of a batch")
    if total is None:
        return Abstention("shm_small", "the size of /dev/shm")
    prefetch = loader.prefetch_factor or 2
    ranks = evidence.ranks_here
    queued = loader.num_workers * prefetch * ranks
    needed = queued * loader.batch_bytes
    room = THRESHOLDS.shm_share * total
    if needed < room:
        return None
    fits = int(room / (loader.num_workers * ranks * loader.batch_bytes))
    facts = [
        f"{count('worker', loader.num_workers)} × {prefetch} batches ahead{f' × {ranks} ranks' if ranks > 1 else ''} × "
        f"{size(loader.batch_bytes)} = {size(needed)} in shared memory",
        f"/dev/shm has {size(total)}",
    ]
    less = f"lower prefetch_factor {prefetch} → {fits}" if 1 <= fits < prefetch else "use fewer workers"
    more = f"Give the container more shared memory (docker run --shm-size={math.ceil(2 * needed / 1e9)}g)"
    # The batches in use and under construction come on top: a job that died near the limit died of it.
    died = evidence.run.run.state in ("crashed", "killed")
    severity: Severity = "severe" if needed > total or died else "warn"
    fix = f"{more}, or {less}{at(loader.where)}."
    return found(evidence, "shm_small", 0.0, facts, fix, loader.where, None, severity)


def passes_through_shm(loader: LoaderRecord) -> bool:
    """Whether batches pass through shared memory: tensors do, arrays and other objects are pickled."""
    kind = (loader.batch_kind or "tensor").lower()
    return not any(word in kind for word in ("numpy", "ndarray", "object", "bytes", "str"))
