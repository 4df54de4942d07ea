"""Several runs side by side: the guides' before/after table of settings, GPU use, memory and speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import TypeAlias

from fulltilt import figures
from fulltilt.records import Diagnosis, Run
from fulltilt.report import wording
from fulltilt.report.palette import BUCKET_TINTS

Reported: TypeAlias = tuple[Run, Diagnosis]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a name and one cell a run. ``differs``: not all runs have the same."""

    name: str
    cells: tuple[str, ...]
    differs: bool


def told_apart(runs: Sequence[Reported]) -> tuple[str, ...]:
    """A name for each run: its own, or that of its folder where several runs have the same."""
    ways = (
        tuple(run.run.name for run, _ in runs),
        tuple(PurePath(run.folder).name for run, _ in runs),
        tuple(run.folder for run, _ in runs),
    )
    return next((names for names in ways if all(names) and len(set(names)) == len(names)), ways[-1])


def compare(runs: Sequence[Reported]) -> tuple[Row, ...]:
    """The rows of the table: settings first, then what came of them. Rows that no run has are left out."""
    answers = [diagnosis for _, diagnosis in runs]
    names = dict.fromkeys(name for answer in answers for name, _ in answer.settings)
    rows = [_row(name, [wording.setting(dict(answer.settings).get(name)) for answer in answers]) for name in names]
    for name, cell in (*_USE, *_shares(answers), *_SPEED):
        rows.append(_row(name, [cell(answer) for answer in answers]))
    rows.append(_row("speed against the first", _against_first(_speeds(answers))))
    return tuple(row for row in rows if any(cell != figures.NOT_MEASURED for cell in row.cells))


def _row(name: str, cells: Sequence[str]) -> Row:
    return Row(name, tuple(cells), differs=len(set(cells)) > 1)


def _speeds(answers: Sequence[Diagnosis]) -> list[float | None]:
    """Samples a second; steps where no run knows its samples."""
    rates = [answer.throughput.samples_per_s for answer in answers]
    return [answer.throughput.steps_per_s for answer in answers] if not any(rates) else rates


def _against_first(rates: Sequence[float | None]) -> list[str]:
    first = rates[0]
    return [f"{rate / first:.2f} ×" if rate is not None and first else figures.NOT_MEASURED for rate in rates]


def _fullest_gpu(answer: Diagnosis) -> str:
    peaks = [gpu.vram_peak_bytes for gpu in answer.gpu if gpu.vram_peak_bytes is not None]
    return figures.size(max(peaks, default=None))


Cell: TypeAlias = Callable[[Diagnosis], str]

# Shares that are always told, and from which share on the others are.
_ALWAYS = ("data_wait_s", "compute_s")
_WORTH_A_ROW = 0.05


def _shares(answers: Sequence[Diagnosis]) -> list[tuple[str, Cell]]:
    """The parts of the time after start-up that matter in one of the runs, as rows."""
    return [
        (f"{tint.label}, after start-up", partial(_share, bucket))
        for bucket, tint in BUCKET_TINTS.items()
        if bucket in _ALWAYS
        or (bucket != "startup_s" and any((_part(bucket, answer) or 0.0) >= _WORTH_A_ROW for answer in answers))
    ]


def _part(bucket: str, answer: Diagnosis) -> float | None:
    active_s = answer.ledger.wall_s - answer.ledger.buckets.startup_s
    return min(getattr(answer.ledger.buckets, bucket) / active_s, 1.0) if active_s > 0 else None


def _share(bucket: str, answer: Diagnosis) -> str:
    return figures.percent(_part(bucket, answer))


_USE: tuple[tuple[str, Cell], ...] = (
    ("GPU use", lambda answer: figures.pct_range([gpu.util_pct for gpu in answer.gpu])),
    ("SM active", lambda answer: figures.pct_range([gpu.sm_active_pct for gpu in answer.gpu])),
    ("GPU memory, peak", _fullest_gpu),
)
_SPEED: tuple[tuple[str, Cell], ...] = (
    ("start-up", lambda answer: figures.seconds(answer.ledger.buckets.startup_s)),
    ("wall time", lambda answer: figures.seconds(answer.ledger.wall_s)),
    ("steps", lambda answer: figures.whole(answer.throughput.steps)),
    ("steps/s", lambda answer: figures.number(answer.throughput.steps_per_s)),
    ("compute ceiling, samples/s", lambda answer: figures.number(answer.ceilings.compute_samples_per_s)),
    ("samples/s", lambda answer: figures.number(answer.throughput.samples_per_s)),
)
