"""One line of a script that makes a loader for each pass is one loader, also where its data set changes. Pure.

The recorder knows such loaders apart, by their length, because a line may make the loaders of training and validation;
here their roles are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from fulltilt.records import HotLine, LoaderRecord, RankRecord, WorkerRecord

# Two that a line makes may be drawn from side by side (labelled and unlabelled), or be two stages.
SIDE_BY_SIDE = 2
Number = TypeVar("Number", int, float)


def one_loader_a_line(rank: RankRecord) -> RankRecord:
    """The rank with the loaders joined that a line made for one pass each, as a curriculum does, and their workers."""
    lines: dict[tuple[str, int], list[LoaderRecord]] = {}
    for loader in rank.loaders:
        if loader.role == "train" and loader.made_by is None and loader.where and loader.passes <= loader.constructed:
            lines.setdefault((loader.where, loader.num_workers), []).append(loader)
    for same in lines.values():
        if len(same) > SIDE_BY_SIDE:
            rank = _with_one(rank, same)
    return rank


def _with_one(rank: RankRecord, same: list[LoaderRecord]) -> RankRecord:
    ids = {loader.loader_id for loader in same}
    kept = same[0].loader_id
    workers = [record for record in rank.workers if record.loader_id in ids]
    return replace(
        rank,
        loaders=tuple(
            _joined_loaders(same) if loader.loader_id == kept else loader
            for loader in rank.loaders
            if loader.loader_id == kept or loader.loader_id not in ids
        ),
        workers=(
            *(record for record in rank.workers if record.loader_id not in ids),
            *([_joined_workers(kept, workers)] if workers else []),
        ),
    )


def _joined_loaders(same: list[LoaderRecord]) -> LoaderRecord:
    first, last = same[0], same[-1]
    return replace(
        last,
        loader_id=first.loader_id,
        constructed=sum(loader.constructed for loader in same),
        passes=sum(loader.passes for loader in same),
        batches=sum(loader.batches for loader in same),
        eval_batches=sum(loader.eval_batches for loader in same),
        samples=_sum_of_known([loader.samples for loader in same]),
        batch_bytes=max((loader.batch_bytes for loader in same if loader.batch_bytes is not None), default=None),
        wait_s=sum(loader.wait_s for loader in same),
        wait_cpu_s=sum(loader.wait_cpu_s for loader in same),
        first_wait_s=first.first_wait_s,
        # The first wait of each later one is that for another pass.
        restart_s=sum(loader.restart_s for loader in same) + sum(loader.first_wait_s for loader in same[1:]),
        sampler_lines=_joined_lines(line for loader in same for line in loader.sampler_lines),
    )


def _joined_workers(loader_id: int, records: list[WorkerRecord]) -> WorkerRecord:
    return WorkerRecord(
        loader_id=loader_id,
        processes=max(record.processes for record in records),
        batches=sum(record.batches for record in records),
        fetch_s=sum(record.fetch_s for record in records),
        fetch_cpu_s=sum(record.fetch_cpu_s for record in records),
        cpu_wait_s=_sum_of_known([record.cpu_wait_s for record in records]),
        idle_s=sum(record.idle_s for record in records),
        process_cpu_s=sum(record.process_cpu_s for record in records),
        read_bytes=_sum_of_known([record.read_bytes for record in records]),
        lines=_joined_lines(line for record in records for line in record.lines),
        pss_bytes=max((record.pss_bytes for record in records if record.pss_bytes is not None), default=None),
    )


def _joined_lines(lines: Iterable[HotLine]) -> tuple[HotLine, ...]:
    total: dict[tuple[str, str, str | None], HotLine] = {}
    for line in lines:
        key = (line.where, line.function, line.call)
        known = total.get(key)
        total[key] = line if known is None else replace(known, seconds=known.seconds + line.seconds)
    return tuple(total.values())


def _sum_of_known(values: Sequence[Number | None]) -> Number | None:
    """The sum; None where one of them was not measured."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
