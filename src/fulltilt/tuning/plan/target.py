"""A metric's history in a training folder, and the target that the user asks about."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fulltilt.errors import UsageError

METRICS_FILE = "metrics.csv"
HUGGING_FACE_FILE = "trainer_state.json"
_SMALL_IS_GOOD = ("loss", "mae", "error", "ece", "rmse", "perplexity")


@dataclass(frozen=True, slots=True)
class Target:
    """``iou=0.75``, and whether larger or smaller is better."""

    metric: str
    value: float
    mode: Literal["max", "min"]


@dataclass(frozen=True, slots=True)
class History:
    """(epoch, value) for a metric, and the seconds an epoch takes, where they were written down."""

    points: tuple[tuple[float, float], ...]
    epoch_s: float | None


def parse_target(text: str) -> Target:
    """``METRIC=VALUE``. Raises UsageError."""
    name, sign, value = text.partition("=")
    try:
        wanted = float(value)
    except ValueError:
        wanted = math.nan
    if not sign or not name.strip() or not math.isfinite(wanted):
        raise UsageError(f"--target {text}: not METRIC=VALUE", "For instance: --target iou=0.75")
    small = any(part in name.lower() for part in _SMALL_IS_GOOD)
    return Target(name.strip(), wanted, "min" if small else "max")


def read_history(folders: Iterable[Path], metric: str) -> History:
    """The metric's history from the first folder that has one. Raises UsageError that names what there is.

    ``iou`` stands for ``eval_iou`` too, as everywhere in a training.
    """
    known: set[str] = set()
    for folder in folders:
        for rows in (_csv_rows(folder / METRICS_FILE), _hugging_face_rows(folder)):
            known.update(name for row in rows for name in row if name not in ("epoch", "seconds"))
            points = _points(rows, metric) or _points(rows, f"eval_{metric}")
            if points:
                seconds = [row["seconds"] for row in rows if math.isfinite(row.get("seconds", math.nan))]
                return History(points, sum(seconds) / len(seconds) if seconds else None)
    if known & {metric, f"eval_{metric}"}:
        raise UsageError(f"--target: {metric} was never a finite number", "Its training diverged, or has no epoch yet.")
    if known:
        raise UsageError(f"--target: no history of {metric}", f"There are: {', '.join(sorted(known))}")
    raise UsageError(
        f"--target: no history of {metric}", f"It is read from {METRICS_FILE} or {HUGGING_FACE_FILE} beside the run."
    )


def _points(rows: list[dict[str, float]], column: str) -> tuple[tuple[float, float], ...]:
    """(epoch, value) of each row; a metric that diverged for an epoch (nan) has none there."""
    pairs = ((row.get("epoch", math.nan), row.get(column, math.nan)) for row in rows)
    return tuple((epoch, value) for epoch, value in pairs if math.isfinite(epoch) and math.isfinite(value))


def _csv_rows(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file. A new column starts a new header line in its middle."""
    rows: list[dict[str, float]] = []
    header: list[str] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for line in csv.reader(file):
                if "epoch" in line:  # Lightning sorts its columns: accuracy comes first
                    header = line
                else:
                    rows.append(_numbers(zip(header, line, strict=False)))
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    return rows


def _hugging_face_rows(folder: Path) -> list[dict[str, float]]:
    states = [folder / HUGGING_FACE_FILE, *sorted(folder.glob(f"checkpoint-*/{HUGGING_FACE_FILE}"))]
    rows: list[dict[str, float]] = []
    for path in states:
        try:
            written = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(written, list) and len(written) > len(rows):
            rows = [_numbers(entry.items()) for entry in written if isinstance(entry, dict)]
    return rows


def _numbers(items: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """What is a number, finite or not."""
    found: dict[str, float] = {}
    for name, value in items:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            found[name] = float(value)
    return found
