"""How batches get from the workers to the training thread: pickling, shared memory, and new passes."""

from __future__ import annotations

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.gains import amdahl, by_removing, gain
from fulltilt.diagnosis.rules.hanging import hung_fetch
from fulltilt.diagnosis.rules.staffing import gain_without_wait, workers_unmeasured
from fulltilt.diagnosis.rules.wording import Judgement, Severity, at, found, made_for_each_pass, rewritten, time_spent
from fulltilt.diagnosis.supply import Limit, Supply
from fulltilt.figures import count, number, percent, seconds, size
from fulltilt.records import Abstention, LoaderRecord

# --------------------------------------------------------------------------- handing over


def input_handover(evidence: Evidence) -> Judgement:
    """The workers are fast enough, but their batches arrive late: pickling, shared memory, rebuilding, pinning."""
    if evidence.limit is Limit.UNKNOWN:
        return workers_unmeasured(evidence, "input_handover")
    loader, supply = evidence.loader, evidence.supply
    if evidence.limit is not Limit.HANDOVER or loader is None or supply is None:
        return None
    if (hung := hung_fetch(evidence, loader, "input_handover")) is not None:
        return hung
    wait_s = evidence.buckets.data_wait_s
    facts = [
        time_spent(evidence, "waiting for data", wait_s),
        f"{count('worker', supply.workers)} could give {number(supply.workers * supply.worker_samples_per_s)} "
        f"samples/s; idle {percent(supply.idle_share)} of the time",
        f"handing over costs the training thread {seconds(supply.main_cpu_s)} of CPU a batch "
        f"({percent(supply.handover_main_share)} of its wait) and the workers "
        f"{percent(supply.handover_worker_share)} of their time",
    ]
    if loader.batch_bytes:
        facts.append(f"a batch has {size(loader.batch_bytes)} as {loader.batch_kind or 'an unknown kind'}")
    fix, promised = _lighter_handover(evidence, loader, supply), gain_without_wait(evidence)
    if fix is None:
        # What the workers rest is all that there is to win, and nothing if each has its own share of slow batches.
        fix, promised = _sooner_batches(evidence, loader), gain(1.0, amdahl(supply.idle_share), cap=promised[1])
    return found(evidence, "input_handover", wait_s, facts, fix, loader.where, promised)


def _lighter_handover(evidence: Evidence, loader: LoaderRecord, supply: Supply) -> str | None:
    """How handing over would cost less; None where it costs next to nothing."""
    limits = evidence.thresholds
    costly = max(supply.handover_main_share, supply.handover_worker_share) >= limits.handover_share / 2
    collate = f"the collate function {loader.collate}" if loader.collate else "the collate function"
    wait_s = loader.wait_s / loader.batches
    alone_s = supply.fetch_s - supply.queue_s
    cheap = alone_s <= limits.cheap_fetch_share * wait_s
    alone = f"fetching a batch takes {seconds(alone_s)}, waiting for a worker's {seconds(wait_s)}"
    if costly and not passes_through_shm(loader):
        fix = (
            f"Let {collate}{at(loader.where)} return tensors (torch.from_numpy, torch.stack): tensors pass through "
            "shared memory, everything else is pickled, sent through a pipe and rebuilt."
        )
        return f"{fix} Or fetch without workers (num_workers=0): {alone}." if cheap else fix
    if cheap:
        return f"Fetch without workers: {rewritten(evidence, loader, num_workers=0)}{at(loader.where)}; {alone}."
    if costly:
        return (
            f"Send fewer and smaller tensors{at(loader.where)}: stack each field into one tensor in {collate}, "
            "keep integers as uint8 and convert them after the batch has arrived."
        )
    return None


def _sooner_batches(evidence: Evidence, loader: LoaderRecord) -> str:
    """Batches are handed out in order: behind one that takes long the others wait, and then the workers do."""
    hint = ", or pinning: try pin_memory=False" if loader.pin_memory else ""
    advice = []
    if loader.made_by is None and "in_order" not in loader.given:
        as_made = rewritten(evidence, loader, in_order=False)
        advice.append(f"Take them as they are made{at(loader.where)}: {as_made}; their order then differs between runs")
    prefetch = loader.prefetch_factor or 2
    if prefetch < evidence.thresholds.deep_queue:
        deeper = rewritten(evidence, loader, prefetch_factor=2 * prefetch)
        advice.append(f"Raise prefetch_factor {prefetch} → {2 * prefetch}{at(loader.where)}: {deeper}")
    if not advice:
        advice.append("Make the slowest samples cheaper, or spread them evenly over the batches")
    why = f"Single batches take long (uneven costs{hint}), and the workers rest until they come, in order."
    return f"{why} {'. Or: '.join(advice)}."


# --------------------------------------------------------------------------- between passes


def epoch_restart(evidence: Evidence) -> Judgement:
    """Each pass over the data begins with starting workers and filling an empty queue."""
    turnover_s = evidence.buckets.epoch_turnover_s
    share = evidence.active_share(turnover_s)
    if share < evidence.thresholds.epoch_turnover_share:
        return None
    loader = _restarted_loader(evidence)
    if loader is None:
        return Abstention("epoch_restart", "the DataLoader whose passes are being restarted")
    if loader.passes < 2:
        return None  # the end of the only pass: its workers are stopped, and nothing begins anew
    facts = [
        time_spent(evidence, "starting passes over the data", turnover_s),
        f"{loader.passes} passes, {seconds(turnover_s / (loader.passes - 1))} for each new one",
    ]
    made_anew = made_for_each_pass(loader)
    if loader.num_workers > 0 and (made_anew or not loader.persistent_workers):
        why = f"the DataLoader is made {loader.constructed} times" if made_anew else "persistent_workers=False"
        workers = "its worker is" if loader.num_workers == 1 else f"its {loader.num_workers} workers are"
        facts.append(f"{workers} started anew for each pass ({why})")
        call = rewritten(evidence, loader, num_workers=loader.num_workers, persistent_workers=True)
        fix = f"Keep the workers alive{at(loader.where)}: {call}."
        if loader.start_method == "spawn":
            fix += " They are spawned, so each start imports the script and its modules again."
    else:
        fix = (
            f"Make fewer, longer passes{at(loader.where)}: "
            "RandomSampler(dataset, num_samples=k * len(dataset), replacement=False) goes k times through the data "
            "in one pass."
        )
    low, high = by_removing(share, evidence.thresholds.recovered_low)
    if loader.batches <= loader.passes * loader.num_workers * (loader.prefetch_factor or 2):
        # All batches of so short a pass are ordered at its beginning: what they wait for is the start as well.
        high = amdahl(share + evidence.active_share(evidence.buckets.data_wait_s))
    return found(evidence, "epoch_restart", turnover_s, facts, fix, loader.where, gain(low, high))


def _restarted_loader(evidence: Evidence) -> LoaderRecord | None:
    loaders = [loader for loader in evidence.rank.loaders if loader.role == "train"] if evidence.rank else []
    return max(loaders, key=lambda loader: (loader.restart_s, loader.passes), default=None)


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
    ranks = max(round(evidence.machine.cpu.usable / max(evidence.usable_cpus, 0.01)), 1)
    queued = loader.num_workers * prefetch * ranks
    needed = queued * loader.batch_bytes
    limit = evidence.thresholds.shm_share
    if needed < limit * total:
        return None
    fits = max(int(limit * total / (loader.num_workers * ranks * loader.batch_bytes)), 0)
    facts = [
        f"{count('worker', loader.num_workers)} × {prefetch} batches ahead{f' × {ranks} ranks' if ranks > 1 else ''} × "
        f"{size(loader.batch_bytes)} = {size(needed)} in shared memory",
        f"/dev/shm has {size(total)}",
    ]
    fix = f"Give the container more shared memory (docker run --shm-size={_gigabytes(2 * needed)}g)"
    if fits >= 1 and fits < prefetch:
        fix += f", or lower prefetch_factor {prefetch} → {fits}{at(loader.where)}"
    elif fits < 1:
        workers = max(int(limit * total / (ranks * loader.batch_bytes)), 0)
        if workers >= 1:
            fix += f", or use num_workers={workers} with prefetch_factor=1{at(loader.where)}"
    # The batch in training and those being put together come on top: a job that died near the limit died of it.
    died = evidence.run.run.state in ("crashed", "killed")
    severity: Severity = "severe" if needed > total or died else "warn"
    return found(evidence, "shm_small", 0.0, facts, fix + ".", loader.where, None, severity)


def passes_through_shm(loader: LoaderRecord) -> bool:
    """Whether batches travel in shared memory: tensors do, arrays and other objects are pickled through a pipe."""
    kind = (loader.batch_kind or "tensor").lower()
    return not any(word in kind for word in ("numpy", "ndarray", "object", "bytes", "str"))


def _gigabytes(needed: float) -> int:
    return max(round(needed / 1e9 + 0.5), 1)
