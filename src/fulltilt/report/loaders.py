"""Loaders by the line that makes them: a script that makes one each epoch has many, and people see one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fulltilt.records import HotLine, LoaderRecord, RankRecord, WorkerRecord


@dataclass(frozen=True, slots=True)
class LoaderSite:
    """All loaders of one role made at one line of the script, and all their workers, as if they were one."""

    loader: LoaderRecord
    work: WorkerRecord | None


def loader_sites(rank: RankRecord) -> list[LoaderSite]:
    """The loaders that gave any batches, in the order in which they were made."""
    groups: dict[object, list[LoaderRecord]] = {}
    for loader in rank.loaders:
        if loader.batches > 0:
            groups.setdefault((loader.where or loader.loader_id, loader.role), []).append(loader)
    sites = []
    for loaders in groups.values():
        numbers = {loader.loader_id for loader in loaders}
        works = [work for work in rank.workers if work.loader_id in numbers]
        sites.append(LoaderSite(_one_loader(loaders), _one_work(works)))
    return sites


def merged_lines(lines: Iterable[HotLine]) -> tuple[HotLine, ...]:
    """The same line seen in several workers as one, the costliest first."""
    merged: dict[tuple[str, str, str | None], float] = {}
    for line in lines:
        key = (line.where, line.function, line.call)
        merged[key] = merged.get(key, 0.0) + line.seconds
    costliest = sorted(merged.items(), key=lambda item: -item[1])
    return tuple(HotLine(where, function, seconds, call) for (where, function, call), seconds in costliest)


def worker_lines(rank: RankRecord) -> tuple[HotLine, ...]:
    """The lines that cost time where batches are fetched: inside the workers of all loaders, or without any."""
    return merged_lines(line for work in rank.workers for line in work.lines)


def fetching_title(rank: RankRecord) -> str:
    """What stands above ``worker_lines``: without workers the training process fetches by itself."""
    fetching = {work.loader_id for work in rank.workers if work.lines}
    staffed = any(loader.num_workers > 0 for loader in rank.loaders if loader.loader_id in fetching)
    return "Inside the workers" if staffed else "Inside the loading"


def _one_loader(loaders: Sequence[LoaderRecord]) -> LoaderRecord:
    samples = [loader.samples for loader in loaders if loader.samples is not None]
    return replace(
        loaders[-1],
        constructed=sum(loader.constructed for loader in loaders),
        passes=sum(loader.passes for loader in loaders),
        batches=sum(loader.batches for loader in loaders),
        samples=sum(samples) if samples else None,
        wait_s=sum(loader.wait_s for loader in loaders),
        wait_cpu_s=sum(loader.wait_cpu_s for loader in loaders),
        first_wait_s=sum(loader.first_wait_s for loader in loaders),
        restart_s=sum(loader.restart_s for loader in loaders),
    )


def _one_work(works: Sequence[WorkerRecord]) -> WorkerRecord | None:
    if not works:
        return None
    waits = [work.cpu_wait_s for work in works if work.cpu_wait_s is not None]
    reads = [work.read_bytes for work in works if work.read_bytes is not None]
    return WorkerRecord(
        loader_id=works[-1].loader_id,
        processes=sum(work.processes for work in works),
        batches=sum(work.batches for work in works),
        fetch_s=sum(work.fetch_s for work in works),
        fetch_cpu_s=sum(work.fetch_cpu_s for work in works),
        cpu_wait_s=sum(waits) if waits else None,
        idle_s=sum(work.idle_s for work in works),
        process_cpu_s=sum(work.process_cpu_s for work in works),
        read_bytes=sum(reads) if reads else None,
        lines=merged_lines(line for work in works for line in work.lines),
    )
