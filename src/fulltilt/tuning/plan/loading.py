"""What workers and their queue hold: RAM by the number of workers, bytes and seconds of batches in advance. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fulltilt.records import LoaderRecord, RankRecord, Run, WorkerRecord

TORCH_DEFAULT_PREFETCH = 2


@dataclass(frozen=True, slots=True)
class LoaderMemory:
    """One number of workers: RAM of them all, batches and bytes queued ahead, and how long those would last.

    Of each rank, which has workers of its own; ``fits`` is for all ranks together.
    """

    workers: int
    workers_bytes: int | None
    queued_batches: int
    queued_bytes: int | None
    buffer_s: float | None
    fits: bool | None


def loader_memory(run: Run, rank: RankRecord, samples_per_s: float | None) -> tuple[LoaderMemory, ...]:
    """Rows for 0, 1, 2, 4 … workers up to the usable CPUs, with the settings in force among them.

    ``samples_per_s`` is what all ranks together can take.
    """
    loader = next((found for found in rank.loaders if found.role == "train"), None)
    if loader is None:
        return ()
    usable = max(1, int(run.run.machine.cpu.usable))
    counts = {0, loader.num_workers, usable, *(2**power for power in range(8) if 2**power < usable)}
    worker = next((found for found in rank.workers if found.loader_id == loader.loader_id), None)
    ranks = max(1, len(run.ranks))
    free = _free_bytes(run)
    free_each = None if free is None else free // ranks
    taken_each = None if samples_per_s is None else samples_per_s / ranks
    return tuple(_row(count, loader, worker, taken_each, free_each) for count in sorted(counts))


def _row(
    workers: int, loader: LoaderRecord, worker: WorkerRecord | None, samples_per_s: float | None, free: int | None
) -> LoaderMemory:
    queued = workers * (loader.prefetch_factor or TORCH_DEFAULT_PREFETCH)
    queued_bytes = None if loader.batch_bytes is None else queued * loader.batch_bytes
    each = worker.pss_bytes if worker is not None and worker.processes else None
    held = 0 if not workers else None if each is None else workers * each
    ahead = None
    if samples_per_s and loader.batch_size:
        ahead = queued * loader.batch_size / samples_per_s
    needed = None if held is None or queued_bytes is None else held + queued_bytes
    fits = None if needed is None or free is None else needed <= free
    return LoaderMemory(workers, held, queued, queued_bytes, ahead, fits)


def _free_bytes(run: Run) -> int | None:
    """RAM that the machine has for workers: its limit less what everything but them took."""
    machine = run.run.machine
    limit = machine.mem_limit_bytes or machine.mem_total_bytes
    used = [sample.host.mem_used_bytes for sample in run.samples if sample.host.mem_used_bytes is not None]
    return limit - min(used) if limit is not None and used else None
