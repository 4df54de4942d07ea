"""Several runs side by side: which rows the table has, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeAlias

from fulltilt.figures import NOT_MEASURED, percent
from fulltilt.records import Diagnosis, Run
from fulltilt.report.palette import BUCKET_TINTS
from fulltilt.report.run_view import RUN_FIGURES, setting

Reported: TypeAlias = tuple[Run, Diagnosis]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a name and one cell a run. ``differs``: not all runs have the same."""

    name: str
    cells: tuple[str, ...]
    differs: bool
    is_setting: bool


def told_apart(runs: Sequence[Reported]) -> tuple[str, ...]:
    """A name for each run: its own, or that of its folder where several runs have the same."""
    ways = (
        tuple(run.run.name for run, _ in runs),
        tuple(PurePath(run.folder).name for run, _ in runs),
        tuple(run.folder for run, _ in runs),
    )
    return next((names for names in ways if all(names) and len(set(names)) == len(names)), ways[-1])


_USE = ("GPU use", "SM active", "GPU memory, peak")
_SPEED = ("start-up", "wall time", "steps", "steps/s", "compute ceiling, samples/s", "samples/s")
# Shares that are always told, and from which share on the others are.
_ALWAYS = ("data_wait_s", "compute_s")
_WORTH_A_ROW = 0.05


def compare(runs: Sequence[Reported]) -> tuple[Row, ...]:
    """The rows of the table: settings first, then what came of them. Rows that no run has are left out."""
    answers = [diagnosis for _, diagnosis in runs]
    rows: list[tuple[str, list[str]]] = []
    settings = dict.fromkeys(name for answer in answers for name, _ in answer.settings)
    for name in settings:
        rows.append((name, [setting(dict(answer.settings).get(name)) for answer in answers]))
    rows += [(name, [RUN_FIGURES[name](answer) for answer in answers]) for name in _USE]
    for bucket, tint in BUCKET_TINTS.items():
        shares = [_share(bucket, answer) for answer in answers]
        if bucket in _ALWAYS or (bucket != "startup_s" and any((share or 0.0) >= _WORTH_A_ROW for share in shares)):
            rows.append((f"{tint.label}, after start-up", [percent(share) for share in shares]))
    rows += [(name, [RUN_FIGURES[name](answer) for answer in answers]) for name in _SPEED]
    rows.append(("relative speed, after start-up", _against_first(answers)))
    told = [(name, cells) for name, cells in rows if any(cell != NOT_MEASURED for cell in cells)]
    return tuple(Row(name, tuple(cells), len(set(cells)) > 1, name in settings) for name, cells in told)


def _against_first(answers: Sequence[Diagnosis]) -> list[str]:
    """By samples a second; by steps where no run knows its samples."""
    rates = [answer.throughput.samples_per_s for answer in answers]
    if not any(rates):
        rates = [answer.throughput.steps_per_s for answer in answers]
    first = rates[0]
    return [f"{rate / first:.2f} ×" if rate is not None and first else NOT_MEASURED for rate in rates]


def _share(bucket: str, answer: Diagnosis) -> float | None:
    active_s = answer.ledger.wall_s - answer.ledger.buckets.startup_s
    return min(getattr(answer.ledger.buckets, bucket) / active_s, 1.0) if active_s > 0 else None
