"""How many workers this machine has room for: CPUs, memory, shared memory and file descriptors. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fulltilt.tuning.live.limits import DEFAULT, Limits


@dataclass(frozen=True, slots=True)
class Room:
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


def most_workers(room: Room, prefetch: int, limits: Limits = DEFAULT) -> tuple[int, str]:
    """The most workers that a new pool may have beside what runs now, and what sets that limit."""
    return min(_bounds(room, prefetch, limits), key=lambda bound: bound[0])


def _bounds(room: Room, prefetch: int, limits: Limits) -> list[tuple[int, str]]:
    share = max(room.cpu_share if room.cpu_share is not None else 1.0, 1 / limits.waiting_workers_per_cpu)
    cpus = room.cpus / room.ranks
    what = "1 usable CPU" if room.cpus == 1 else f"{room.cpus:g} usable CPUs"
    bounds = [(max(math.ceil(cpus / share) - room.other_workers, 1), what)]
    queued_bytes = (prefetch + 1) * (room.batch_bytes or 0)
    if room.memory_free_bytes is not None:
        grown = room.worker_bytes * limits.worker_growth if room.worker_bytes else limits.unmeasured_worker_bytes
        free = limits.memory_share * room.memory_free_bytes / room.ranks
        bounds.append((int(free // (grown + queued_bytes)), "free memory"))
    if room.shm_free_bytes is not None and queued_bytes:
        free = limits.shm_share * room.shm_free_bytes / room.ranks
        bounds.append((int(free // queued_bytes), "free /dev/shm"))
    if room.files_left is not None:
        each = limits.files_per_worker + (prefetch + 1) * room.tensors_per_batch
        bounds.append((int(limits.files_share * room.files_left // each), "open files (ulimit -n)"))
    return bounds
