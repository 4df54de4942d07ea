"""How many workers this machine can take: CPUs, memory, shared memory and file descriptors."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from fulltilt.probes.host import cpu_capacity, memory_headroom_bytes, shared_memory_bytes
from fulltilt.recorder.loaders import LoaderTap
from fulltilt.recorder.session import Session
from fulltilt.tuning.live.limits import DEFAULT, Limits
from fulltilt.tuning.live.window import Fetches


@dataclass(frozen=True, slots=True)
class Capacity:
    """What is left for the workers of one loader. None means not known, and then it does not limit.

    ``cpu_share`` is the part of a fetch that needs a CPU; ``other_workers`` are those of the job's other loaders, and
    ``ranks`` the processes of the job that share this machine. ``worker_bytes`` is the measured PSS of one worker.
    """

    cpus: float
    cpu_share: float | None = None
    ranks: int = 1
    other_workers: int = 0
    memory_free_bytes: int | None = None
    worker_bytes: int | None = None
    shm_free_bytes: int | None = None
    batch_bytes: int | None = None
    files_left: int | None = None
    tensors_per_batch: int = 0
    can_pin: bool = False


def most_workers(capacity: Capacity, prefetch: int, limits: Limits = DEFAULT) -> tuple[int, str]:
    """The most workers that a new pool may have beside what runs now, and what sets that limit."""
    return min(_bounds(capacity, prefetch, limits), key=lambda bound: bound[0])


def _bounds(capacity: Capacity, prefetch: int, limits: Limits) -> list[tuple[int, str]]:
    share = max(capacity.cpu_share if capacity.cpu_share is not None else 1.0, 1 / limits.waiting_workers_per_cpu)
    cpus = capacity.cpus / capacity.ranks
    what = "1 usable CPU" if capacity.cpus == 1 else f"{capacity.cpus:g} usable CPUs"
    bounds = [(max(math.ceil(cpus / share) - capacity.other_workers, 1), what)]
    queued_bytes = (prefetch + 1) * (capacity.batch_bytes or 0)
    if capacity.memory_free_bytes is not None:
        measured = capacity.worker_bytes
        grown = measured * limits.worker_growth if measured else limits.unmeasured_worker_bytes
        free = limits.memory_share * capacity.memory_free_bytes / capacity.ranks
        bounds.append((int(free // (grown + queued_bytes)), "free memory"))
    if capacity.shm_free_bytes is not None and queued_bytes:
        free = limits.shm_share * capacity.shm_free_bytes / capacity.ranks
        bounds.append((int(free // queued_bytes), "free /dev/shm"))
    if capacity.files_left is not None:
        each = limits.files_per_worker + (prefetch + 1) * capacity.tensors_per_batch
        bounds.append((int(limits.files_share * capacity.files_left // each), "open files (ulimit -n)"))
    return bounds


def measure_capacity(session: Session, tap: LoaderTap, other_workers: int, tensors_per_batch: int) -> Capacity:
    """What is left for a new pool of this loader, beside everything that runs now."""
    told = session.state.workers.get(tap.loader_id)
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Capacity(
        cpus=cpu_capacity().usable,
        cpu_share=_cpu_share(session, tap),
        ranks=max(int(local_ranks), 1) if local_ranks.isdigit() else 1,
        other_workers=other_workers,
        memory_free_bytes=memory_headroom_bytes(),
        worker_bytes=max(told.pss_bytes.values(), default=None) if told is not None else None,
        shm_free_bytes=shared_memory_bytes()[1],
        batch_bytes=tap.batch_bytes,
        files_left=_files_left(),
        tensors_per_batch=tensors_per_batch,
        can_pin=_can_pin(session),
    )


def fetches_so_far(session: Session, tap: LoaderTap) -> Fetches:
    """What the workers of a loader have told of their fetches."""
    workers = session.state.workers.get(tap.loader_id)
    return Fetches(workers.batches, workers.fetch_s) if workers is not None else Fetches()


def _cpu_share(session: Session, tap: LoaderTap) -> float | None:
    """The part of fetching in which a CPU is used or queued for."""
    workers = session.state.workers.get(tap.loader_id)
    if workers is not None and workers.fetch_s > 0:
        return min((workers.fetch_cpu_s + (workers.cpu_wait_s or 0.0)) / workers.fetch_s, 1.0)
    return min(tap.timed_cpu_s / tap.timed_wait_s, 1.0) if tap.timed_wait_s else None


def _files_left() -> int | None:
    """File descriptors that this process may still open; None where nobody tells."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if soft == resource.RLIM_INFINITY else max(soft - len(os.listdir("/proc/self/fd")), 0)  # noqa: PTH208
    except (ImportError, OSError):
        return None


def _can_pin(session: Session) -> bool:
    """Whether batches are copied to a GPU from memory that is not pinned."""
    import torch

    copies = session.state.copies
    return session.recorder.clock is not None and copies.asked > 0 and copies.pageable > 0 and torch.cuda.is_available()
