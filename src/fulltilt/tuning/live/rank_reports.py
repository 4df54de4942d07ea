"""How the ranks of a job agree before live tuning acts, so that all of them change settings at the same batch.

Ranks train in lockstep: a trial on one slows all of them down. So each rank writes its measurements to a file in its
run folder. Once rank 0 has read the reports of all, it writes the slowest rank's figures, and a batch that no rank has
reached; at that batch each rank takes the same decision from the same figures. No rank waits for a missing report.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fulltilt import store
from fulltilt.figures import loader_settings
from fulltilt.tuning.live.controller import Capacity, most_workers
from fulltilt.tuning.live.measurement import Knobs, Measurement

# How far ahead the batch is at which they act: each rank must have read the file by then.
AHEAD_S = 1.0
AHEAD_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank reports after ``batch`` batches of a loader, or what all ranks act on at that batch.

    One of these is set: ``left_alone`` or ``failed`` (a trial), which say why; ``is_random``, the outcome of the batch
    check; ``seen``, the rate of the settings in force or on trial. ``cpus`` is the mask of usable CPUs, ``knobs`` are
    the script's own settings.
    """

    loader: str
    batch: int
    host: str
    cpus: str
    knobs: Knobs
    capacity: Capacity
    seen: Measurement | None = None
    is_random: bool | None = None
    failed: str | None = None
    left_alone: str | None = None


def agree(reports: Sequence[Report]) -> Report:
    """The common report of all ranks; ``reports`` begin with rank 0."""
    first = reports[0]
    for rank, report in enumerate(reports):
        if report.left_alone is not None:
            return replace(first, left_alone=f"on rank {rank}, {report.left_alone}")
        if report.knobs != first.knobs:
            differ = f"{loader_settings(*first.knobs)} on rank 0, {loader_settings(*report.knobs)} on rank {rank}"
            return replace(first, left_alone=f"its settings are not the same on all ranks ({differ})")
    ranks = Counter(report.host for report in reports)
    sharing = Counter((report.host, report.cpus) for report in reports)
    capacities = [
        replace(report.capacity, ranks=ranks[report.host], cpu_ranks=sharing[report.host, report.cpus])
        for report in reports
    ]
    failed = (f"on rank {rank}, {one.failed}" for rank, one in enumerate(reports) if one.failed is not None)
    seen = [one.seen for one in reports if one.seen is not None]
    draws = [one.is_random for one in reports if one.is_random is not None]
    return replace(
        first,
        capacity=min(capacities, key=lambda one: most_workers(one, first.knobs.prefetch_factor)[0]),
        # All ranks wait for the one that waits longest for data.
        seen=max(seen, key=lambda one: one.wait_share, default=None),
        is_random=any(draws) if draws else None,
        failed=next(failed, None),
    )


class RankReports:
    """The reports of all ranks of a process group, in the run folder, or in those of all tasks."""

    def __init__(self, folder: Path, group: str, rank: int, world_size: int) -> None:
        self.waiting_for: int | None = None  # the first rank whose report rank 0 lacks
        self._tasks = folder.parent if store.is_task(folder) else None
        self.world_size, self._folder = world_size, folder
        self._name = f"{store.LIVE}.{re.sub(r'[^A-Za-z0-9._-]+', '-', group)}"
        self._reports = store.LineWriter(folder / self._file(rank))
        self._agreed = store.LineWriter(folder / self._file()) if rank == 0 else None
        self._read: dict[str, tuple[Path, int, list[Report]]] = {}  # path, bytes read, lines, by the file's name

    def _file(self, rank: int | None = None) -> str:
        return f"{self._name}.jsonl" if rank is None else f"{self._name}.rank-{rank}.jsonl"

    def write(self, report: Report) -> None:
        """Report to the other ranks, once a round. A report with ``left_alone`` is the last."""
        self._reports.write([report])

    def agreed(self, loader: str, number: int, batch: int, batches_per_s: float) -> Report | None:
        """What all ranks act on in this round, once they have drawn its ``batch``; None: not yet known.

        ``batch`` and ``batches_per_s`` are those of this rank.
        """
        self.waiting_for = None
        if (known := self._line(self._file(), loader, number)) is not None:
            return known
        if self._agreed is None:  # rank 0 will write it, unless it has left its loader alone meanwhile
            last = self._line(self._file(0), loader, number + 1)
            return None if last is None or last.left_alone is None else replace(agree([last]), batch=batch)
        reports: list[Report] = []
        for rank in range(self.world_size):
            if (report := self._line(self._file(rank), loader, number)) is None:
                self.waiting_for = rank
                return None
            reports.append(report)
        ahead = AHEAD_BATCHES + math.ceil(AHEAD_S * batches_per_s)
        self._agreed.write([replace(agree(reports), batch=max(batch, *(one.batch for one in reports)) + ahead)])
        return None

    def _line(self, name: str, loader: str, number: int) -> Report | None:
        """A file's report on a loader in this round, or an earlier one that left it alone; None: not there yet.

        A file is opened again each time its line is missing, since NFS then shows what others have written.
        """
        path, offset, lines = self._read.get(name) or (self._find(name), 0, [])
        found = _of_round(lines, loader, number)
        if found is None and path is not None:
            new, offset = store.read_new_lines(path, Report, offset)
            self._read[name] = path, offset, [*lines, *new]
            found = _of_round([*lines, *new], loader, number)
        return found

    def _find(self, name: str) -> Path | None:
        if self._tasks is None:
            return self._folder / name
        return next(self._tasks.glob(f"*/{name}"), None)


def _of_round(lines: list[Report], loader: str, number: int) -> Report | None:
    said = [line for line in lines if line.loader == loader]
    if number < len(said):
        return said[number]
    return said[-1] if said and said[-1].left_alone is not None else None
