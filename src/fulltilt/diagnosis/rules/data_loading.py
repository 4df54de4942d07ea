"""Training waits for data: it makes its own batches, or its workers are short of CPU or wait for storage."""

from __future__ import annotations

import re

from fulltilt.diagnosis.evidence import Evidence, wait_after_loader_s
from fulltilt.diagnosis.findings import (
    OTHERS_TAKE_CPUS,
    WORKERS_SHARE_LOCK,
    Judgement,
    at,
    busy_thread,
    call_at,
    costliest_line,
    fetching_line,
    found,
    hung_fetch,
    line_cost,
    neighbours,
    rates,
    rewritten,
    waiting_for_data,
    with_cheaper_call,
)
from fulltilt.diagnosis.libraries import (
    SLOW_ENVIRONMENT,
    beside_training,
    divides_itself,
    setting_name,
    steps_an_environment,
)
from fulltilt.diagnosis.loader_bottleneck import Bottleneck, Supply, queue_for_cpus, sampling_share
from fulltilt.diagnosis.predicted_gain import Gain, amdahl, by_removing, gain
from fulltilt.diagnosis.preflight import PLACES
from fulltilt.diagnosis.rules.worker_count import (
    WorkerPlan,
    divided_among,
    gain_without_wait,
    plan_workers,
    unplanned_gain,
    unplanned_workers,
    workers_unmeasured,
)
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import capital, count, cpus, number, percent, seconds, size
from fulltilt.records import Finding, FindingCode, HotLine, LoaderRecord, WorkerRecord

# --------------------------------------------------------------------------- shared by the rules below


def _set_workers(evidence: Evidence, loader: LoaderRecord, workers: int) -> str:
    call = rewritten(evidence, loader, num_workers=workers, persistent_workers=True)
    return f"Set {setting_name(loader, 'num_workers')}={workers}{at(loader.where)}: {call}."


def _gain_beside_training(share: float, usable_cpus: float) -> Gain:
    """One worker hides the shorter of making batches and training on them; several divide the making among them."""
    one, several = divided_among(share, 1), divided_among(share, int(usable_cpus) - 1)
    return gain(1 + (one - 1) * THRESHOLDS.recovered_low, several)


def _line_gain(evidence: Evidence, line: HotLine | None) -> Gain:
    """The gain if the costliest line took half of its time, or none, up to training that no longer waits."""
    if line is None or evidence.workers is None:
        return gain_without_wait(evidence)
    part = min(line.seconds / evidence.workers.fetch_s, 1.0)
    cap = amdahl(evidence.data_wait_share)
    if evidence.crowded_by_workers:
        cap *= amdahl(part * evidence.workers_share)  # compute gets the CPUs that this frees
    return gain(amdahl(part * THRESHOLDS.recovered_low), amdahl(part), cap=cap)


def _need_and_room(evidence: Evidence, plan: WorkerPlan) -> str:
    if evidence.supply is not None and evidence.supply.waits and plan.advised > evidence.usable_cpus:
        return "such workers wait and take hardly any CPU, so there may be more of them than CPUs"
    if plan.crowds:
        return (
            f"the job keeps {number((evidence.host.tree_cpu_pct or 0.0) / 100)} of its {cpus(evidence.usable_cpus)} "
            "busy already: more workers take CPU time from the training, and may even make it slower (measure it)"
        )
    room = f"{_cpus(evidence)}, enough for {count('such worker', plan.allowed)} beside the training"
    if plan.needed <= plan.allowed:
        return f"{count('worker', plan.needed)} would hide the wait; {room}"
    line, fetch_s = costliest_line(evidence), evidence.workers.fetch_s if evidence.workers else 0.0
    telling = line is not None and line.seconds >= THRESHOLDS.guilty_function_share * fetch_s
    costly = f"{line.function} ({line.where})" if line and telling else "fetching"
    return f"no number of workers that fits here hides all of the wait: {room}; for the rest, make {costly} cheaper"


def _cpus(evidence: Evidence) -> str:
    shared = "each rank" if evidence.ranks_here > 1 else "the job"
    return f"{shared} may use {cpus(evidence.usable_cpus)}"


# Where it is not known whether fetching waits for something that begins only when it is asked for.
_NO_SOONER = (
    "Workers do not help if fetching waits for something that comes no sooner when asked earlier (a lock, another "
    "process, a queue, a service with a rate limit)."
)


# --------------------------------------------------------------------------- the training thread makes its own batches


def input_serial(evidence: Evidence) -> Judgement:
    """The training thread makes its batches itself: a DataLoader without workers, or none, or its sampler is slow."""
    loader = evidence.loader
    if evidence.bottleneck is Bottleneck.AFTER_LOADER and loader is not None:
        return _slow_generator(evidence, loader)
    if evidence.bottleneck is not Bottleneck.SERIAL:
        return None
    if loader is None or loader.made_by == "script":
        return _made_by_hand(evidence)
    if loader.batches and not loader.wait_s and not loader.first_wait_s:
        return _drawn_by_own_thread(evidence, loader)
    if loader.num_workers or sampling_share(loader) >= THRESHOLDS.sampling_share:
        return _slow_sampler(evidence, loader)
    if hung := hung_fetch(evidence, loader, "input_serial"):
        return hung
    return _no_workers(evidence, loader)


def _no_workers(evidence: Evidence, loader: LoaderRecord) -> Finding:
    facts, plan = [], plan_workers(evidence)
    workers = plan.advised if plan else unplanned_workers(evidence)
    line = costliest_line(evidence)
    beside = beside_training(loader, workers)
    if supply := evidence.supply:
        how = "num_workers=0" if beside is None else f"drawn from {loader.made_by} without a DataLoader"
        queueing, computing = supply.queue_s / supply.batch_s, min(supply.batch_cpu_s / supply.batch_s, 1.0)
        facts.append(
            f"{how}: a batch takes {seconds(supply.batch_s)}, {percent(computing)} on the CPU"
            + (f", {percent(queueing)} waiting for a CPU" if queueing >= THRESHOLDS.warn_share else "")
            + ("; fetching mostly waits instead of computing" if supply.waits else "")
        )
    if line and loader.wait_s > 0:
        facts.append(f"of the fetching, {line_cost(line, loader.wait_s)}")
    facts += rates(evidence) + (others := neighbours(evidence))
    if beside is None:
        fix = _set_workers(evidence, loader, workers)
    else:
        fix = f"Make the next batches while this one trains{at(loader.where)}: {beside}."
    if plan:
        fix += f" {capital(_need_and_room(evidence, plan))}."
    if loader.iterable and beside is None and not divides_itself(loader):
        fix += " Its IterableDataset must split the data with get_worker_info(), or every worker yields all of it."
    predicted = plan.gain if plan else unplanned_gain(evidence, workers)
    if beside is None and supply is not None and supply.batch_s < THRESHOLDS.handing_over_s:
        place = line.where if line else loader.where
        fix = (
            f"Make fetching cheaper{at(place)}: a batch takes {seconds(supply.batch_s)}, and handing one over from a "
            "worker would take about as long."
        )
        predicted = gain_without_wait(evidence)
    fix, predicted = with_cheaper_call(evidence, line, loader.wait_s, fix, predicted)
    computes = supply is None or supply.batch_cpu_s + supply.queue_s >= THRESHOLDS.warn_share * supply.batch_s
    if others and computes:  # workers would share the CPUs with them as well
        fix += f" {OTHERS_TAKE_CPUS}"
        predicted = gain(1.0, predicted[1])
    if supply is not None and supply.waits:
        fix += f" {_NO_SOONER}"
        predicted = gain(1.0, predicted[1])
    return waiting_for_data(evidence, "input_serial", facts, fix, loader.where, predicted)


def _slow_sampler(evidence: Evidence, loader: LoaderRecord) -> Finding:
    """The sampler takes most of the wait: workers would not help."""
    share = sampling_share(loader)
    line = max(loader.sampler_lines, key=lambda line: line.seconds)
    facts = [
        f"{percent(share)} of it is the sampler, which workers do not run, in {count('pass', loader.passes)}",
        f"of the wait, {line_cost(line, loader.wait_s)}",
    ]
    if line.where.startswith("torch/"):
        where = loader.where
        fix = (
            f"Let the sampler{at(where)} do less: draw only as many indices as are used (num_samples), or make fewer "
            "and longer passes."
        )
    else:
        where = line.where
        fix = (
            f"{call_at(line)} runs in the training thread: compute the order once an epoch, "
            "for all batches together (NumPy, torch.argsort), or take indices from a list made beforehand."
        )
    predicted = by_removing(share * evidence.data_wait_share)
    return waiting_for_data(evidence, "input_serial", facts, fix, where, predicted, title="Data loading: slow sampler")


def _made_by_hand(evidence: Evidence) -> Finding:
    """A job without a loader: the training thread makes each batch, or waits for other threads or processes."""
    line = costliest_line(evidence) if evidence.loader else next(iter(evidence.drawing_lines), None)
    where = line.where if line else None
    costs = [line_cost(line)] if line else []
    if line and line.waits:
        made = "no DataLoader was seen: the script's own threads, processes or event loop make the batches"
        fix = f"{call_at(line)} waits for batches: "
        if thread := busy_thread(evidence):
            named, fact = thread
            costs.append(fact)
            fix += f"move the work of {named} to processes (a DataLoader with num_workers), or make it cheaper."
        else:
            fix += "make them in more threads or processes, and earlier, or make each one cheaper."
        predicted, what = by_removing(evidence.data_wait_share), "waiting for batches"
        title = "Data loading: the script's own loader is too slow"
    elif line and steps_an_environment(line):
        made, title = "no DataLoader was seen: training makes its own experience", "Data loading: slow environment"
        fix, what = f"{call_at(line)}: {SLOW_ENVIRONMENT}.", "collecting experience"
        divided = 1 - 1 / max(evidence.usable_cpus, 1.0)
        predicted = gain(1.0, amdahl(evidence.data_wait_share * divided))
    else:
        source = evidence.rank.drawn_from
        drawn = call_at(source) if source else None
        made = "no DataLoader was seen: the training thread makes each batch itself" + (
            f", in {drawn}" if drawn else ""
        )
        fix = (
            f"Make the next batch while this one trains: put {drawn or f'the code{at(where)}'} into a "
            "torch.utils.data.IterableDataset that yields whole batches, and draw them from "
            "DataLoader(dataset, batch_size=None, num_workers=1). Unless they are random, the batches stay the same."
        )
        predicted = _gain_beside_training(evidence.data_wait_share, evidence.usable_cpus)
        wait_s = evidence.buckets.data_wait_s
        fix, predicted = with_cheaper_call(evidence, line, wait_s, fix, predicted)
        # On a GPU the thread is also off the CPU while it waits for the GPU.
        if (evidence.rank.off_cpu_s or 0.0) > THRESHOLDS.cpu_bound_share * wait_s and not evidence.on_gpu:
            fix, predicted = f"{fix} {_NO_SOONER}", gain(1.0, predicted[1])
        what, title = "making batches", "Data loading: no DataLoader"
    return waiting_for_data(evidence, "input_serial", [made, *costs], fix, where, predicted, what, title)


def _slow_generator(evidence: Evidence, loader: LoaderRecord) -> Finding:
    """A generator of the script is slow to process what a loader gave it."""
    wait_s = evidence.buckets.data_wait_s
    cost_s = wait_after_loader_s(evidence.rank, wait_s)
    line = next(iter(evidence.drawing_lines), None)
    where = line.where if line else None
    facts = [
        f"{percent(cost_s / wait_s)} of it is the script's own generator, after the loader{at(loader.where)}",
        *([line_cost(line)] if line else []),
    ]
    workers = max(loader.num_workers, unplanned_workers(evidence))
    call = rewritten(evidence, loader, num_workers=workers, persistent_workers=True)
    fix = (
        f"Let workers do what the code{at(where)} does to each batch: put it into the data set "
        f"or the collate_fn of the loader, {call}{at(loader.where)}."
    )
    predicted = _gain_beside_training(evidence.share(cost_s), evidence.usable_cpus)
    fix, predicted = with_cheaper_call(evidence, line, cost_s, fix, predicted)
    title = "Data loading: slow generator after the loader"
    return waiting_for_data(evidence, "input_serial", facts, fix, where, predicted, "waiting for batches", title)


def _drawn_by_own_thread(evidence: Evidence, loader: LoaderRecord) -> Finding:
    """A thread of the script draws from a loader without workers: a single worker would be no faster."""
    workers = max(unplanned_workers(evidence), 2)
    line = next((line for line in evidence.drawing_lines if line.waits), None)
    facts = [
        "num_workers=0: the script's own thread fetches one batch after another while the training runs",
        *([line_cost(line)] if line else []),
    ]
    fix = f"{_set_workers(evidence, loader, workers)} One worker would be no faster than the script's own thread."
    most = min(workers * (1 + THRESHOLDS.rate_error), amdahl(evidence.data_wait_share))
    title = "Data loading: one thread"
    return waiting_for_data(evidence, "input_serial", facts, fix, loader.where, gain(1.0, most), title=title)


# --------------------------------------------------------------------------- workers too slow


def input_cpu_bound(evidence: Evidence) -> Judgement:
    """The workers compute all the time: there are too few of them, or a sample costs too much."""
    return _workers_too_slow(evidence, "input_cpu_bound", Bottleneck.CPU)


def input_io_bound(evidence: Evidence) -> Judgement:
    """The workers spend their time waiting: for a disk, a network, a lock."""
    return _workers_too_slow(evidence, "input_io_bound", Bottleneck.IO)


def _workers_too_slow(evidence: Evidence, code: FindingCode, bottleneck: Bottleneck) -> Judgement:
    if evidence.bottleneck is Bottleneck.UNKNOWN:
        return workers_unmeasured(evidence, code)
    loader, supply = evidence.loader, evidence.supply
    if evidence.bottleneck is not bottleneck or loader is None or supply is None:
        return None
    cold = _cold_first_pass(evidence, evidence.workers) if evidence.workers else None
    if cold is not None and cold.share >= THRESHOLDS.recovered_low * evidence.data_wait_share:
        return None  # reported as slow_storage
    if special := hung_fetch(evidence, loader, code) or _contended_lock(evidence, code):
        return special
    line = costliest_line(evidence)
    facts = [_worker_time(supply, bottleneck), *fetching_line(evidence), *rates(evidence)]
    facts += (others := neighbours(evidence) if bottleneck is Bottleneck.CPU else [])
    plan = plan_workers(evidence)
    if plan and plan.raises:
        kept = {} if loader.persistent_workers else {"persistent_workers": True}
        call = rewritten(evidence, loader, num_workers=plan.advised, **kept)
        fix = (
            f"Raise {setting_name(loader, 'num_workers')} {plan.now} → {plan.advised}{at(loader.where)}: {call}. "
            f"At this cost per batch, {_need_and_room(evidence, plan)}."
        )
        predicted = plan.gain
    else:
        fix, predicted = _cheaper_fetch(evidence, loader, bottleneck, line), _line_gain(evidence, line)
    if evidence.workers:
        fix, predicted = with_cheaper_call(evidence, line, evidence.workers.fetch_s, fix, predicted)
    if loader.iterable and loader.num_workers > 1 and not divides_itself(loader):
        fix += (
            f" Check that {loader.dataset} skips the samples of other workers (get_worker_info()) before it reads and "
            "decodes them: otherwise each worker does the work of all."
        )
    if others:  # workers more would share the CPUs with them as well
        fix += f" {OTHERS_TAKE_CPUS}"
        predicted = gain(1.0, predicted[1])
    if bottleneck is Bottleneck.IO:
        read = evidence.workers.read_bytes if evidence.workers else None
        if read is not None and read >= THRESHOLDS.storage_read_bytes_per_s * evidence.active_s:
            facts.append(f"the workers read {size(read)} from storage, {size(read / max(evidence.active_s, 1e-9))}/s")
        elif read is not None:
            waited_for = "the network file system" if _stage_data(evidence) else "a lock, a sleep or a service"
            if plan and plan.raises and not _stage_data(evidence):
                fix, predicted = f"{fix} {_NO_SOONER}", gain(1.0, predicted[1])
            facts.append(f"the workers read only {size(read)} from storage: they wait for {waited_for}")
        facts += _storage_kind(evidence)
        fix += _stage_data(evidence)
    return waiting_for_data(evidence, code, facts, fix, line.where if line else loader.where, predicted)


def _worker_time(supply: Supply, bottleneck: Bottleneck) -> str:
    busy = supply.busy_share if supply.busy_share is not None else supply.batch_cpu_s / supply.batch_s
    workers = count("worker", supply.workers)
    nature = f"{percent(1 - busy)} waiting, not computing"
    if bottleneck is Bottleneck.CPU:
        queue = " or waiting for a CPU" if queue_for_cpus(supply, THRESHOLDS.warn_share) else ""
        nature = f"{percent(busy)} computing{queue}"
    return f"{workers} at {seconds(supply.batch_s)} a batch, {nature}, idle {percent(supply.idle_share)} of their time"


def _cheaper_fetch(evidence: Evidence, loader: LoaderRecord, bottleneck: Bottleneck, line: HotLine | None) -> str:
    place = f"{line.function} ({line.where})" if line else f"the data set {loader.dataset}"
    if bottleneck is Bottleneck.IO:
        return f"Make {place} wait less: read larger pieces at a time, or cache what was read."
    return (
        f"Make {place} cheaper: {count('worker', loader.num_workers)} and the training fill the CPUs "
        f"({_cpus(evidence)}). Do its deterministic part once and store the result, or move arithmetic to the GPU."
    )


def _storage_kind(evidence: Evidence) -> list[str]:
    data = evidence.workers.data if evidence.workers else None
    if data is None or data.kind not in PLACES:
        return []
    return [f"the files in {data.path} are {PLACES[data.kind]} ({data.filesystem or 'of unknown type'})"]


def _stage_data(evidence: Evidence) -> str:
    """Advice for data on a network file system; empty for other data."""
    data = evidence.workers.data if evidence.workers else None
    over_network = data is not None and data.kind == "network"
    return f" Or copy {data.path} to a disk of this machine before the job." if data and over_network else ""


# Locks that only the source shows: calls into C, and libraries that sleep until a file is free.
_LOCKS = re.compile(r"\.acquire\(|\b(flock|lockf)\(|^with \S*lock", re.IGNORECASE)


def _contended_lock(evidence: Evidence, code: FindingCode) -> Finding | None:
    """The finding for workers that wait for one lock; None where they seldom do."""
    workers = evidence.workers
    calls = [(line, line.call or "") for line in workers.lines] if workers else []
    locks = [line for line, call in calls if (line.waits and call.startswith("with ")) or _LOCKS.search(call)]
    line = max(locks, key=lambda line: line.seconds, default=None)
    if workers is None or line is None or line.seconds < THRESHOLDS.contended_share * workers.fetch_s:
        return None
    facts = [f"of the workers' fetching, {line_cost(line, workers.fetch_s)}, where they wait for a lock"]
    fix = (
        f"{line.call}{at(line.where)} lets one process at a time through, so more workers would only queue there. "
        "Hold the lock for a shorter time, or give each worker a file, a handle or a connection of its own."
    )
    return waiting_for_data(
        evidence, code, facts, fix, line.where, _line_gain(evidence, line), title=WORKERS_SHARE_LOCK
    )


# --------------------------------------------------------------------------- storage


def slow_storage(evidence: Evidence) -> Judgement:
    """The workers wait for storage: many small reads, or a first pass over files that later are in RAM."""
    loader, work = evidence.loader, evidence.workers
    if loader is None or work is None or not work.read_bytes:
        return None
    if (cold := _cold_first_pass(evidence, work)) is not None:
        return cold
    if evidence.bottleneck is not Bottleneck.IO or evidence.supply is None or not work.reads:
        return None
    small = work.read_bytes < THRESHOLDS.small_read_bytes * work.reads
    if not small or work.read_bytes < THRESHOLDS.storage_read_bytes_per_s * evidence.active_s:
        return None
    if hung_fetch(evidence, loader, "slow_storage") or _contended_lock(evidence, "slow_storage"):
        return None
    line = costliest_line(evidence)
    facts = [
        _worker_time(evidence.supply, Bottleneck.IO),
        f"{number(work.reads / evidence.active_s)} reads a second, {size(work.read_bytes / work.reads)} each from "
        f"storage, {size(work.read_bytes / evidence.active_s)}/s",
        *fetching_line(evidence),
        *_storage_kind(evidence),
    ]
    fix = (
        "Read fewer and larger pieces: pack the samples into files of some hundred megabytes (tar shards for "
        "WebDataset, LMDB, HDF5, Parquet) and read those in sequence."
        f"{_stage_data(evidence) or ' Or copy the data to a faster disk first.'}"
    )
    where = line.where if line else loader.where
    return waiting_for_data(evidence, "slow_storage", facts, fix, where, gain_without_wait(evidence))


def _cold_first_pass(evidence: Evidence, work: WorkerRecord) -> Finding | None:
    """The finding for files that only the first pass read from storage; None where later passes did, too."""
    first, *later = work.read_bytes_by_pass or (0,)
    if not later or first < THRESHOLDS.cold_factor * max(later) or first < THRESHOLDS.cold_bytes:
        return None
    spans = [span for own in evidence.run.spans for span in own if span.steps > 0]
    began = min((span.epoch for span in spans), default=0)
    waits_s, steps = [0.0, 0.0], [0, 0]
    for span in spans:
        waits_s[span.epoch > began] += span.buckets.data_wait_s
        steps[span.epoch > began] += span.steps
    cold_s, warm_s = (wait_s / max(number, 1) for wait_s, number in zip(waits_s, steps, strict=True))
    cost_s = (cold_s - warm_s) * steps[0] / max(len(evidence.run.spans), 1)
    share = evidence.share(cost_s)
    if not steps[1] or cold_s < THRESHOLDS.cold_factor * warm_s or share < THRESHOLDS.data_wait_share:
        return None
    facts = [
        f"in the first pass the workers read {size(first)} from storage, in a later one at most {size(max(later))}",
        f"training waits {seconds(cold_s)} a step for data in the first pass, {seconds(warm_s)} later, when the files "
        "are cached in RAM",
        *_storage_kind(evidence),
    ]
    fix = (
        "Only the first pass is slow. Read the files once before the job, from several processes "
        "(find DATA -type f -print0 | xargs -0 -P 8 cat > /dev/null), or copy them to a local disk or to /dev/shm."
    )
    loader = evidence.loader
    return found(evidence, "slow_storage", cost_s, facts, fix, loader.where if loader else None, by_removing(share))
