"""What the machine has left for workers, measured at the moment of a decision."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fulltilt.probes.host import cpu_capacity, memory_headroom_bytes, shared_memory_bytes
from fulltilt.recorder.loaders import LoaderTap
from fulltilt.recorder.rank_state import RankState
from fulltilt.recorder.session import Session
from fulltilt.tuning.live.room import Room
from fulltilt.tuning.live.window import Fetches

if TYPE_CHECKING:
    from fulltilt.tuning.live.tuner import LoaderTuner


def measure_room(session: Session, tuners: Mapping[int, LoaderTuner], tuner: LoaderTuner) -> Room:
    """The room for a new pool of this tuner's loader, beside everything that runs now."""
    sizes = [size for pool in tuner.pools() if (size := pool.worker_bytes())]
    others = (pool for other in tuners.values() if other is not tuner for pool in other.pools())
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Room(
        cpus=cpu_capacity().usable,
        cpu_share=_cpu_share(session.notes, tuner.tap),
        ranks=max(int(local_ranks), 1) if local_ranks.isdigit() else 1,
        other_workers=sum(pool.knobs.workers for pool in others),
        memory_free_bytes=memory_headroom_bytes(),
        worker_bytes=max(sizes, default=None),
        shm_free_bytes=shared_memory_bytes()[1],
        batch_bytes=tuner.tap.batch_bytes,
        files_left=_files_left(),
        tensors_per_batch=tuner.tensors_per_batch,
        can_pin=_can_pin(session),
    )


def fetches_so_far(notes: RankState, tap: LoaderTap) -> Fetches:
    """What the workers of a loader have told of their fetches."""
    workers = notes.workers.get(tap.loader_id)
    return Fetches(workers.batches, workers.fetch_s) if workers is not None else Fetches()


def _cpu_share(notes: RankState, tap: LoaderTap) -> float | None:
    """The part of fetching in which a CPU is used or queued for."""
    workers = notes.workers.get(tap.loader_id)
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
    copies = session.notes.copies
    return session.recorder.clock is not None and copies.asked > 0 and copies.pageable > 0 and torch.cuda.is_available()
