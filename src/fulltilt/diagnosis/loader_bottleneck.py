"""What a batch of a loader costs, and which part of the loader is its bottleneck.

Exactly one part is, so the causes exclude each other. Idle workers are fast enough: then the hand-over to the training
thread is the bottleneck. Workers that queue for a CPU are too many. All others either compute or wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from fulltilt.diagnosis.ledger import Spans, paused_s, rare_host_code_s, sum_buckets
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.records import HotLine, LiveRecord, LoaderRecord, RankRecord, WorkerRecord

# --------------------------------------------------------------------------- the first batches of a pass


def without_first_batches(rank: RankRecord) -> RankRecord:
    """The rank, its workers without the first batches of their passes where those took much longer than others.

    There a worker imports modules, compiles and opens files: that says nothing of what a batch costs. An iterable data
    set may fill a shuffle buffer, whose samples are in later batches.
    """
    indexed = {loader.loader_id for loader in rank.loaders if not loader.iterable}
    return replace(
        rank, workers=tuple(_later_batches(work) if work.loader_id in indexed else work for work in rank.workers)
    )


def _later_batches(work: WorkerRecord) -> WorkerRecord:
    first_s, first_cpu_s, first_wait_s = work.first_fetch_s, work.first_fetch_cpu_s, work.first_cpu_wait_s
    if not work.first_batches or first_s is None or first_cpu_s is None or first_wait_s is None:
        return work
    later = work.batches - work.first_batches
    if later < THRESHOLDS.later_batches or first_s * later < THRESHOLDS.slow_first_batch * work.first_batches * (
        work.fetch_s - first_s
    ):
        return work
    firsts = {(line.where, line.function): line.seconds for line in work.first_lines}
    lines = (replace(one, seconds=one.seconds - firsts.get((one.where, one.function), 0.0)) for one in work.lines)
    return replace(
        work,
        batches=later,
        fetch_s=work.fetch_s - first_s,
        fetch_cpu_s=max(work.fetch_cpu_s - first_cpu_s, 0.0),
        process_cpu_s=max(work.process_cpu_s - first_cpu_s, 0.0),
        cpu_wait_s=None if work.cpu_wait_s is None else max(work.cpu_wait_s - first_wait_s, 0.0),
        lines=joined_lines(line for line in lines if line.seconds > 0),
    )


def joined_lines(lines: Iterable[HotLine]) -> tuple[HotLine, ...]:
    """Records of the same line added up, the costliest first."""
    total: dict[tuple[str, str, str | None], HotLine] = {}
    for line in lines:
        key = (line.where, line.function, line.call)
        known = total.get(key)
        total[key] = line if known is None else replace(known, seconds=known.seconds + line.seconds)
    return tuple(sorted(total.values(), key=lambda line: -line.seconds))


# --------------------------------------------------------------------------- what sets the rate of the input


class Bottleneck(Enum):
    """What sets the rate of data loading."""

    NONE = "data loading keeps up"
    SERIAL = "the training thread fetches by itself, or its sampler is slow"
    AFTER_LOADER = "what the script does to the batches after the loader"
    AFFINITY = "the workers may run on some of the CPUs only"
    OVERSUBSCRIBED = "more processes than CPUs"
    HANDOVER = "the way from the workers to the training thread"
    CPU = "the workers compute"
    IO = "the workers wait"
    UNKNOWN = "the workers were not measured"


@dataclass(frozen=True, slots=True)
class Supply:
    """What one batch costs. Seconds are per batch; shares are of time.

    ``batch_s`` is what one worker (without workers, the training thread) needs for a batch, hand-over included;
    ``fetch_s`` is the part of it in the data set and the collate function, ``queue_s`` the part spent waiting for a
    CPU, as far as that is known. ``main_cpu_s`` is CPU time of the training thread in next(), which no number of
    workers reduces.
    """

    workers: int
    samples_per_batch: float
    batch_s: float
    batch_cpu_s: float
    fetch_s: float
    busy_share: float | None
    queue_s: float = 0.0
    main_cpu_s: float = 0.0
    idle_share: float = 0.0
    handover_main_share: float = 0.0
    handover_worker_share: float = 0.0
    queueing_share: float | None = None

    @property
    def worker_samples_per_s(self) -> float:
        """The rate of one worker (without workers, of the training thread)."""
        return self.samples_per_batch / self.batch_s

    @property
    def waits(self) -> bool:
        """Whether fetching mostly waits (for a disk, a network, a sleep): it neither computes nor lacks a CPU."""
        return self.busy_share is not None and self.busy_share < THRESHOLDS.cpu_bound_share


def sampling_share(loader: LoaderRecord) -> float:
    """How much of the wait for a loader's batches is its sampler, by stack samples of the training thread."""
    seen_s = sum(line.seconds for line in loader.sampler_lines)
    return min(seen_s / loader.wait_s, 1.0) if loader.wait_s > 0 else 0.0


def measure_supply(
    loader: LoaderRecord,
    workers: WorkerRecord | None,
    spans: Spans,
    tuned: LiveRecord | None = None,
    thread_cpu_wait_s: float | None = None,
) -> Supply | None:
    """What a loader's batches cost; None where that was not measured.

    ``tuned`` is what live tuning did to the loader. ``thread_cpu_wait_s`` is how long the training thread, which
    fetches where there are no workers, had no CPU.
    """
    if loader.batches == 0 or not loader.samples:
        return None
    if loader.num_workers == 0:
        return _serial_supply(loader, spans, thread_cpu_wait_s or 0.0)
    if workers is None or workers.batches == 0 or workers.fetch_s / workers.batches <= 0:
        return None
    outside_cpu_s = max(workers.process_cpu_s - workers.fetch_cpu_s, 0.0)
    working_s = workers.fetch_s + outside_cpu_s
    # A worker hands a batch over while it waits for the next indices: that CPU time is not idle time.
    idle_s = max(workers.idle_s - outside_cpu_s - _paused_s(loader.num_workers, workers, spans), 0.0)
    idle_share = idle_s / (idle_s + working_s)
    if tuned is not None and tuned.loader_id == loader.loader_id and tuned.moves and tuned.batches_per_s is not None:
        # While live tuning tries other workers the old ones only stand by: the rate says how busy the others are.
        idle_share = max(1 - tuned.batches_per_s * working_s / workers.batches / loader.num_workers, 0.0)
    queueing_s = workers.cpu_wait_s
    return Supply(
        workers=loader.num_workers,
        samples_per_batch=loader.samples / loader.batches,
        batch_s=working_s / workers.batches,
        batch_cpu_s=workers.process_cpu_s / workers.batches,
        fetch_s=workers.fetch_s / workers.batches,
        queue_s=min(queueing_s or 0.0, workers.fetch_s) / workers.batches,
        main_cpu_s=loader.wait_cpu_s / loader.batches,
        busy_share=None if queueing_s is None else min((workers.fetch_cpu_s + queueing_s) / workers.fetch_s, 1.0),
        idle_share=idle_share,
        handover_main_share=_handing_over(loader),
        handover_worker_share=outside_cpu_s / working_s,
        queueing_share=None if queueing_s is None else queueing_s / max(workers.fetch_cpu_s + queueing_s, 1e-9),
    )


def _handing_over(loader: LoaderRecord) -> float:
    """The share of the wait in which the training thread unpacks batches: its CPU time without that of the sampler."""
    cpu_share = loader.wait_cpu_s / loader.wait_s if loader.wait_s > 0 else 0.0
    return min(max(cpu_share - sampling_share(loader), 0.0), 1.0)


def _paused_s(number: int, workers: WorkerRecord, spans: Spans) -> float:
    """Idle seconds of all workers while training drew no batches.

    That is validation, checkpoints, what the script does between two epochs, and what it does before the first step
    when the workers have started. Workers that end with each pass do not see all of it, so the pause is at most what
    they lived beyond the time in which training drew batches.
    """
    buckets = sum_buckets(span.buckets for span in spans)
    pauses_s = paused_s(buckets) + rare_host_code_s(spans)
    drawing_s = buckets.total_s - buckets.startup_s - buckets.epoch_turnover_s - pauses_s
    return min(max(workers.fetch_s + workers.idle_s - number * drawing_s, 0.0), number * (pauses_s + buckets.startup_s))


def _serial_supply(loader: LoaderRecord, spans: Spans, cpu_wait_s: float) -> Supply | None:
    # The first wait, if it was a part of start-up, says nothing of a batch: modules are imported, files opened.
    batches = loader.batches - (loader.first_wait_s > 0)
    batch_s = loader.wait_s / batches if batches else loader.first_wait_s
    batch_cpu_s = (loader.wait_cpu_s + loader.helpers_cpu_s) / max(batches, 1)
    busy_s = min(batch_cpu_s, batch_s)  # on several threads it takes less time than CPU time
    if loader.samples is None or batch_s <= 0:
        return None
    buckets = sum_buckets(span.buckets for span in spans)
    active_s = max(buckets.total_s - buckets.startup_s, 1e-9)
    # Assumes that the thread lacks a CPU as often while it fetches as at other times: it is not measured per batch.
    queue_s = min(batch_s * min(cpu_wait_s / active_s, 1.0), batch_s - busy_s)
    return Supply(
        workers=0,
        samples_per_batch=loader.samples / loader.batches,
        batch_s=batch_s,
        batch_cpu_s=batch_cpu_s,
        fetch_s=batch_s,
        queue_s=queue_s,
        busy_share=(busy_s + queue_s) / batch_s,
    )


def loader_ceiling(
    supply: Supply, usable_cpus: float, wait_share: float, delivered_samples_per_s: float | None
) -> float:
    """The best rate of the loader alone, in samples a second.

    Training that waits nearly always, for workers that are never idle, already takes all that the loader can give.
    """
    saturated = wait_share >= THRESHOLDS.starved_share and supply.idle_share <= THRESHOLDS.never_idle_share
    if supply.workers > 0 and saturated and delivered_samples_per_s is not None:
        return delivered_samples_per_s
    if supply.workers == 0:
        return supply.worker_samples_per_s
    limits = [supply.workers * supply.worker_samples_per_s]
    if supply.batch_cpu_s > 0 and (supply.busy_share is None or supply.busy_share >= THRESHOLDS.cpu_bound_share):
        limits.append(usable_cpus * supply.samples_per_batch / supply.batch_cpu_s)
    if supply.main_cpu_s > 0:
        limits.append(supply.samples_per_batch / supply.main_cpu_s)
    # At least what it gave: a worker's mean includes its slow first batches.
    return max(min(limits), delivered_samples_per_s or 0.0)


def find_bottleneck(
    wait_share: float,
    after_loader_share: float,
    loader: LoaderRecord | None,
    supply: Supply | None,
    delivered_samples_per_s: float | None,
    threads_per_cpu: float,
    bound_to_few_cpus: bool = False,
) -> Bottleneck:
    """Which part of data loading sets its rate.

    ``after_loader_share`` is how much of the wait was for no loader; ``threads_per_cpu`` counts workers and threads;
    ``bound_to_few_cpus``, whether the workers may run on fewer CPUs than the job.
    """
    if wait_share < THRESHOLDS.data_wait_share:
        return Bottleneck.NONE
    if after_loader_share > THRESHOLDS.after_loader_share:
        return Bottleneck.AFTER_LOADER
    if loader is None or loader.num_workers == 0 or sampling_share(loader) >= THRESHOLDS.sampling_share:
        return Bottleneck.SERIAL
    if supply is None:
        return Bottleneck.UNKNOWN
    if bound_to_few_cpus and queue_for_cpus(supply, THRESHOLDS.affinity_queueing_share):
        return Bottleneck.AFFINITY
    # Too many workers also look idle: they queue for a CPU after a fetch and before the next one as well.
    if is_oversubscribed(supply, threads_per_cpu):
        return Bottleneck.OVERSUBSCRIBED
    if supply.idle_share >= THRESHOLDS.idle_workers_share or _handover_explains(supply, delivered_samples_per_s):
        # Workers also idle while the training thread, which gives them their indices, runs the sampler.
        sampled = sampling_share(loader) >= THRESHOLDS.guilty_function_share
        return Bottleneck.SERIAL if sampled else Bottleneck.HANDOVER
    if supply.busy_share is not None:
        return Bottleneck.CPU if supply.busy_share >= THRESHOLDS.cpu_bound_share else Bottleneck.IO
    if supply.batch_cpu_s >= THRESHOLDS.cpu_bound_share * supply.batch_s:
        return Bottleneck.CPU
    # Little CPU time can mean waiting for storage or for a CPU; only free CPUs rule the second out.
    return Bottleneck.IO if threads_per_cpu <= 1 else Bottleneck.UNKNOWN


def is_oversubscribed(supply: Supply, threads_per_cpu: float) -> bool:
    """Whether workers and threads are so many that they queue for the CPUs."""
    return threads_per_cpu >= THRESHOLDS.threads_per_cpu and queue_for_cpus(supply, THRESHOLDS.queueing_share)


def queue_for_cpus(supply: Supply, share: float) -> bool:
    """Whether workers that compute wait for a CPU for this share of the time in which they could run."""
    if supply.queueing_share is None or supply.queueing_share < share:
        return False
    # Workers that mostly wait for storage may queue for the little they compute: that is not what takes their time.
    return supply.busy_share is None or supply.busy_share >= THRESHOLDS.cpu_bound_share


def _handover_explains(supply: Supply, delivered_samples_per_s: float | None) -> bool:
    """Whether pickling, sharing and rebuilding batches takes so much CPU time that it sets the rate."""
    cost = max(supply.handover_main_share, supply.handover_worker_share)
    if cost >= THRESHOLDS.handover_share:
        return True
    capacity = supply.workers * supply.worker_samples_per_s
    spare = delivered_samples_per_s is not None and capacity >= THRESHOLDS.spare_capacity * delivered_samples_per_s
    return spare and cost >= THRESHOLDS.handover_share / 2
