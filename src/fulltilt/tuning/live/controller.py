"""Which settings to try next while a job trains, and whether they pay: pure functions of what was measured so far.

Workers come first: a jump to a number that may be enough, then numbers next to the best. The queue's depth comes last.
"""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass

from fulltilt.probes.host import cpu_capacity, memory_headroom_bytes, shared_memory_bytes
from fulltilt.recorder.loaders import LoaderStats
from fulltilt.recorder.session import Session
from fulltilt.tuning.live.limits import DEFAULT as LIMITS
from fulltilt.tuning.live.measurement import Knobs, Measurement
from fulltilt.tuning.next_trial import Bracket


@dataclass(frozen=True, slots=True)
class Settle:
    """Keep the settings in force; ``why`` is for the user."""

    why: str


def decide(
    seen: tuple[Measurement, ...], capacity: Capacity, failed: tuple[Knobs, ...] = (), undecided: int = 0
) -> Knobs | Settle:
    """What to try next, or Settle. ``seen`` begins with the script's settings; ``failed`` are settings that broke.

    ``undecided``: how many more trials there were whose gain could not be determined.
    """
    best = best_of(seen)
    if best.wait_share <= LIMITS.enough_wait_share:
        return Settle("the loader is no longer the limit")
    if len(seen) - 1 + len(failed) + undecided >= LIMITS.most_moves:
        return Settle(f"{LIMITS.most_moves} settings were tried")
    most, what = most_workers(capacity, best.knobs.prefetch_factor)
    # Batches a second that training could consume if it never waited.
    ceiling = 1 / max(min(one.busy_s for one in seen), 1e-9)
    tried = [
        *((one.knobs.num_workers, one.batches_per_s) for one in seen),
        *((knobs.num_workers, 0.0) for knobs in failed),
    ]
    bracket = Bracket.of(tried, most, ceiling, seen[0].wait_share)
    workers = _next_workers(seen[0], len(seen) + len(failed), bracket)
    if workers is not None:
        return Knobs(workers, best.knobs.prefetch_factor, best.knobs.pin_memory or capacity.can_pin)
    # Uneven batches can empty a short queue although the workers keep up on average.
    deeper = best.knobs._replace(prefetch_factor=min(2 * best.knobs.prefetch_factor, LIMITS.most_prefetch))
    known = {one.knobs[:2] for one in seen} | {other[:2] for other in failed}
    once = best.knobs.prefetch_factor == seen[0].knobs.prefetch_factor and deeper[:2] not in known
    if once and 0 < deeper.num_workers <= most_workers(capacity, deeper.prefetch_factor)[0]:
        return deeper
    limit = f"; there is room for {most} workers ({what})" if best.knobs.num_workers >= most else ""
    return Settle(f"no other setting promises more{limit}")


def best_of(seen: tuple[Measurement, ...]) -> Measurement:
    """The fastest of the settings measured."""
    return max(seen, key=lambda one: one.batches_per_s)


def pays(before: Measurement, trial: Measurement, again: Measurement) -> bool | None:
    """Whether a trial's settings are worth keeping: faster than those in force, or as fast with fewer workers.

    ``before`` and ``again`` are the settings in force, measured before and after the trial. None: undecided, since
    these two differ by more than the gain.
    """
    low, high = sorted((before.batches_per_s, again.batches_per_s))
    fewer = 0 < trial.knobs.num_workers < before.knobs.num_workers
    if trial.batches_per_s > low and high - low > max(trial.batches_per_s - high, LIMITS.paid_share * high):
        return None
    error = math.hypot(trial.spread, before.spread / 2, again.spread / 2)
    surely = (1 + LIMITS.sure_errors * error) * (low + high) / 2
    return trial.batches_per_s > (high if fewer else max((1 + LIMITS.paid_share) * high, surely))


def pays_clearly(before: Measurement, trial: Measurement) -> bool:
    """Whether a trial gains so much that the settings in force need not be measured again after it."""
    return trial.batches_per_s >= LIMITS.clear_gain * before.batches_per_s


def at_pace_of(
    again: Measurement, before: Measurement, trial: Measurement, seen: tuple[Measurement, ...]
) -> tuple[Measurement, ...]:
    """All measurements, the trial last, scaled to the present pace, at which the settings in force give ``again``.

    The job's pace during the trial is taken to be the mean of ``before`` and ``again``.
    """
    since = again.batches_per_s / before.batches_per_s
    during = 2 * since / (1 + since)
    earlier = (again if one.knobs == again.knobs else one.times(since) for one in seen if one.knobs != trial.knobs)
    return *earlier, trial.times(during)


def _next_workers(start: Measurement, tried: int, bracket: Bracket) -> int | None:
    """The number of workers to try next: first a jump to what may be enough, then next to the best so far."""
    if bracket.most < 1:
        return None
    if tried == 1 or not bracket.rates:
        half = max(1, round(bracket.most / 2))
        each = bracket.one or start.batches_per_s / start.knobs.num_workers
        first = min(half, math.ceil(LIMITS.worker_headroom * bracket.ceiling / each))
        if first != start.knobs.num_workers:
            return first
    return bracket.next_count()


# --------------------------------------------------------------------------- how many workers there is room for


@dataclass(frozen=True, slots=True)
class Capacity:
    """What is left for the workers of one loader; None is unknown and sets no limit.

    ``cpu_share`` is the share of a fetch that needs a CPU; ``other_workers`` are those of the job's other loaders.
    ``ranks`` of the job share this machine, ``cpu_ranks`` of them these CPUs (a launcher may give each its own).
    ``worker_bytes`` is the measured PSS of one worker.
    """

    cpus: float
    cpu_share: float | None = None
    ranks: int = 1
    cpu_ranks: int = 1
    other_workers: int = 0
    memory_free_bytes: int | None = None
    worker_bytes: int | None = None
    shm_free_bytes: int | None = None
    batch_bytes: int | None = None
    files_left: int | None = None
    tensors_per_batch: int = 0
    can_pin: bool = False


def most_workers(capacity: Capacity, prefetch: int) -> tuple[int, str]:
    """The most workers that a new pool may have, and what sets that limit."""
    share = max(capacity.cpu_share if capacity.cpu_share is not None else 1.0, 1 / LIMITS.waiting_workers_per_cpu)
    what = "1 usable CPU" if capacity.cpus == 1 else f"{capacity.cpus:g} usable CPUs"
    if capacity.ranks > 1:  # all ranks together have no more workers than there are CPUs
        what += f" for {capacity.cpu_ranks} ranks" if capacity.cpu_ranks > 1 else ""
        bounds = [(max(int(capacity.cpus // capacity.cpu_ranks) - capacity.other_workers, 0), what)]
    else:
        bounds = [(max(math.ceil(capacity.cpus / share) - capacity.other_workers, 1), what)]
    queued_bytes = (prefetch + 1) * (capacity.batch_bytes or 0)
    if capacity.memory_free_bytes is not None:
        measured = capacity.worker_bytes
        grown = measured * LIMITS.worker_growth if measured else LIMITS.unmeasured_worker_bytes
        free = LIMITS.memory_share * capacity.memory_free_bytes / capacity.ranks
        bounds.append((int(free // (grown + queued_bytes)), "free memory"))
    if capacity.shm_free_bytes is not None and queued_bytes:
        free = LIMITS.shm_share * capacity.shm_free_bytes / capacity.ranks
        bounds.append((int(free // queued_bytes), "free /dev/shm"))
    if capacity.files_left is not None:
        each = LIMITS.files_per_worker + (prefetch + 1) * capacity.tensors_per_batch
        bounds.append((int(LIMITS.files_share * capacity.files_left // each), "open files (ulimit -n)"))
    return min(bounds)


def measure_capacity(session: Session, stats: LoaderStats, other_workers: int, tensors_per_batch: int) -> Capacity:
    """What is left for a new pool of this loader."""
    measured = stats.workers
    told_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = max(int(told_ranks), 1) if told_ranks.isdigit() else 1
    return Capacity(
        cpus=cpu_capacity().usable,
        cpu_share=_cpu_share(stats),
        ranks=ranks,
        cpu_ranks=ranks,
        other_workers=other_workers,
        memory_free_bytes=memory_headroom_bytes(),
        worker_bytes=max((one.pss_bytes or 0 for one in measured.last.values()), default=0) or None
        if measured
        else None,
        shm_free_bytes=shared_memory_bytes()[1],
        batch_bytes=stats.facts.largest_bytes,
        files_left=_files_left(),
        tensors_per_batch=tensors_per_batch,
        can_pin=_can_pin(session),
    )


def _cpu_share(stats: LoaderStats) -> float | None:
    """The share of fetching that uses a CPU or waits for one."""
    workers = None if stats.workers is None else stats.workers.record(stats.loader_id)
    if workers is not None and workers.fetch_s > 0:
        return min((workers.fetch_cpu_s + (workers.cpu_wait_s or 0.0)) / workers.fetch_s, 1.0)
    return min(stats.timed_cpu_s / stats.timed_wait_s, 1.0) if stats.timed_wait_s else None


def _files_left() -> int | None:
    """File descriptors that this process may still open; None where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(soft - len(os.listdir("/proc/self/fd")), 0)  # noqa: PTH208


def _can_pin(session: Session) -> bool:
    """Whether batches are copied to a GPU from pageable memory."""
    import torch

    copies = session.state.copies
    return session.recorder.clock is not None and copies.asked > 0 and copies.pageable > 0 and torch.cuda.is_available()
