"""The input cannot keep up: which part of it, and what to do about that part."""

from __future__ import annotations

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.gains import Gain, amdahl, gain
from fulltilt.diagnosis.rules.handmade import drawn_by_own_thread, made_behind_loader, made_by_hand
from fulltilt.diagnosis.rules.hanging import hung_fetch
from fulltilt.diagnosis.rules.locking import contended_lock
from fulltilt.diagnosis.rules.sampling import slow_sampler
from fulltilt.diagnosis.rules.staffing import (
    Staffing,
    gain_without_wait,
    plan_workers,
    unplanned_workers,
    workers_unmeasured,
)
from fulltilt.diagnosis.rules.wording import (
    Judgement,
    at,
    costliest_line,
    found,
    line_cost,
    rates,
    rewritten,
    time_spent,
)
from fulltilt.diagnosis.supply import Limit, Supply, sampling_share
from fulltilt.figures import count, cpus, percent, seconds, size
from fulltilt.records import Finding, FindingCode, HotLine, LoaderRecord

# --------------------------------------------------------------------------- no workers


def input_serial(evidence: Evidence) -> Judgement:
    """The training thread makes its batches itself: a DataLoader without workers, or none, or its sampler is slow."""
    if evidence.limit is Limit.BEHIND and evidence.loader is not None:
        return made_behind_loader(evidence, evidence.loader)
    if evidence.limit is not Limit.SERIAL:
        return None
    if evidence.loader is None or evidence.loader.made_by == "script":
        return made_by_hand(evidence)
    if evidence.loader.batches and not evidence.loader.wait_s:
        return drawn_by_own_thread(evidence, evidence.loader)
    if sampling_share(evidence.loader) >= evidence.thresholds.sampling_share:
        return slow_sampler(evidence, evidence.loader)
    return hung_fetch(evidence, evidence.loader, "input_serial") or _no_workers(evidence, evidence.loader)


def _no_workers(evidence: Evidence, loader: LoaderRecord) -> Finding:
    wait_s = evidence.buckets.data_wait_s
    facts = [time_spent(evidence, "waiting for data", wait_s)]
    if supply := evidence.supply:
        facts.append(
            f"num_workers=0: the training thread fetches each batch itself, {seconds(supply.batch_s)} a batch, "
            f"{percent(supply.busy_share or 0.0)} of it on the CPU"
        )
    if (line := costliest_line(evidence)) and loader.wait_s > 0:
        facts.append(f"of the fetching, {line_cost(line, loader.wait_s)}")
    facts += _known(rates(evidence))
    plan = plan_workers(evidence)
    workers = plan.advised if plan else unplanned_workers(evidence)
    fix = (
        f"Set num_workers={workers}{at(loader.where)}: "
        f"{rewritten(evidence, loader, num_workers=workers, persistent_workers=True)}."
    )
    if plan and supply:
        fix += (
            f" A sample takes {seconds(supply.batch_s / supply.samples_per_batch)} to fetch: "
            f"{_need_and_room(evidence, plan)}."
        )
    if loader.iterable:
        fix += (
            " Its IterableDataset must split the work by torch.utils.data.get_worker_info(), "
            "or every worker yields all of it."
        )
    predicted = plan.gain if plan else gain_without_wait(evidence)
    return found(evidence, "input_serial", wait_s, facts, fix, loader.where, predicted)


# --------------------------------------------------------------------------- workers at their limit


def input_cpu_bound(evidence: Evidence) -> Judgement:
    """The workers compute all the time and there are too few of them, or their work is too dear."""
    return _workers_limit(evidence, "input_cpu_bound", Limit.CPU)


def input_io_bound(evidence: Evidence) -> Judgement:
    """The workers spend their time waiting: for a disk, a network, a lock."""
    return _workers_limit(evidence, "input_io_bound", Limit.IO)


def _workers_limit(evidence: Evidence, code: FindingCode, limit: Limit) -> Judgement:
    if evidence.limit is Limit.UNKNOWN:
        return workers_unmeasured(evidence, code)
    loader, supply = evidence.loader, evidence.supply
    if evidence.limit is not limit or loader is None or supply is None:
        return None
    if (hung := hung_fetch(evidence, loader, code)) is not None:
        return hung
    if (queued := contended_lock(evidence, loader, code)) is not None:
        return queued
    wait_s = evidence.buckets.data_wait_s
    line = costliest_line(evidence)
    facts = [time_spent(evidence, "waiting for data", wait_s), _worker_time(supply, limit)]
    if line and evidence.workers:
        facts.append(f"of the workers' fetching, {line_cost(line, evidence.workers.fetch_s)}")
    facts += _known(rates(evidence))
    if limit is Limit.IO:
        facts += _storage_facts(evidence)
    plan = plan_workers(evidence)
    if plan and plan.raises:
        fix = _raise_workers(evidence, loader, plan)
        predicted = plan.gain
    else:
        fix = _cheaper_fetch(evidence, loader, limit, line)
        predicted = _line_gain(evidence, line)
    if limit is Limit.IO:
        fix += _stage_data(evidence)
    return found(evidence, code, wait_s, facts, fix, line.where if line else loader.where, predicted)


def _worker_time(supply: Supply, limit: Limit) -> str:
    busy = supply.busy_share if supply.busy_share is not None else supply.batch_cpu_s / supply.batch_s
    workers = count("worker", supply.workers)
    nature = f"{percent(busy)} computing" if limit is Limit.CPU else f"{percent(1 - busy)} waiting, not computing"
    return f"{workers} at {seconds(supply.batch_s)} a batch, {nature}, idle {percent(supply.idle_share)} of the time"


def _raise_workers(evidence: Evidence, loader: LoaderRecord, plan: Staffing) -> str:
    changes: dict[str, int | bool] = {"num_workers": plan.advised}
    if not loader.persistent_workers:
        changes["persistent_workers"] = True
    return (
        f"Raise num_workers {plan.now} → {plan.advised}{at(loader.where)}: {rewritten(evidence, loader, **changes)}. "
        f"At its cost a batch, {_need_and_room(evidence, plan)}."
    )


def _cheaper_fetch(evidence: Evidence, loader: LoaderRecord, limit: Limit, line: HotLine | None) -> str:
    place = f"{line.function} ({line.where})" if line else f"the data set {loader.dataset}"
    if limit is Limit.IO:
        beside = f": {loader.num_workers} workers already wait side by side" if loader.num_workers > 1 else ""
        return f"Make {place} wait less{beside}. Read larger pieces at a time, or keep what was read."
    return (
        f"Make {place} cheaper: {count('worker', loader.num_workers)} and the training fill the CPUs "
        f"({_cpus(evidence)}). "
        "Do its deterministic part once and store the result, work on smaller inputs, or move it to the GPU."
    )


def _storage_facts(evidence: Evidence) -> list[str]:
    facts = []
    read = evidence.workers.read_bytes if evidence.workers else None
    if read is not None and read >= evidence.thresholds.storage_read_bytes_per_s * evidence.active_s:
        facts.append(f"the workers read {size(read)} from storage, {size(read / max(evidence.active_s, 1e-9))}/s")
    elif read is not None:
        facts.append(f"the workers read only {size(read)} from storage: they wait for a lock, a sleep or a service")
    data = evidence.run.run.data
    if data and data.kind != "unknown":
        facts.append(f"the data in {data.path} lies on {data.kind} ({data.filesystem or 'file system unknown'})")
    return facts


def _stage_data(evidence: Evidence) -> str:
    data = evidence.run.run.data
    if data and data.kind not in ("tmpfs", "unknown") and data.fits_in_ram and data.total_bytes:
        return f" Its {size(data.total_bytes)} fit in RAM: copying {data.path} to a RAM disk ends the waiting."
    return ""


# --------------------------------------------------------------------------- shared by the rules above


def _line_gain(evidence: Evidence, line: HotLine | None) -> Gain:
    """If the costliest line took half of its time, or none: the loader gets faster until training no longer waits."""
    if line is None or evidence.workers is None:
        return gain_without_wait(evidence)
    part = min(line.seconds / evidence.workers.fetch_s, 1.0)
    unhindered = amdahl(evidence.active_share(evidence.buckets.data_wait_s))
    return gain(amdahl(part * evidence.thresholds.recovered_low), amdahl(part), cap=unhindered)


def _need_and_room(evidence: Evidence, plan: Staffing) -> str:
    needed = f"{count('worker', plan.needed)} would hide it"
    room = f"{_cpus(evidence)}, enough for {count('such worker', plan.allowed)} beside the training"
    if plan.needed <= plan.allowed:
        return f"{needed}; {room}"
    if plan.needed > evidence.thresholds.out_of_reach * plan.allowed:
        return f"no number of workers that fits here would hide it: {room}; a cheaper fetch must give the rest"
    return f"{needed}, but {room}; a cheaper fetch must give the rest"


def _cpus(evidence: Evidence) -> str:
    cpu = evidence.machine.cpu
    source = "the quota allows" if cpu.quota is not None and cpu.quota <= cpu.affinity else "the machine has"
    shared = " for each rank" if evidence.usable_cpus < cpu.usable else ""
    return f"{source} {cpus(evidence.usable_cpus)}{shared}"


def _known(fact: str | None) -> list[str]:
    return [fact] if fact else []
