"""What a study may try, which of its trials count, and which is best. Pure functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import LinearRegression, linear_regression
from typing import Literal

from fulltilt.errors import UsageError
from fulltilt.records import LoaderRecord, Settings, Trial

# Settings that change what is trained: tried only where the user allows them by name.
ALLOWABLE = ("batch", "accumulation", "precision", "compile")
LOADER_SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
MOST_WORKERS = 64
# torch's default where there are workers.
DEFAULT_PREFETCH = 2
# A change is worth a trial, and worth having, from this speedup on.
WORTH = 1.02
# Below this data-wait share the loader does not limit the job.
WAITS = 0.03
# The knee: doubling the batch gains less than this.
KNEE = 1.05
# Share of the GPU's memory that a job can use; the rest is fragmentation and the driver's.
USABLE_VRAM = 0.92
# Samples a second; outside of this range a record is damaged.
POSSIBLE = (1e-9, 1e15)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A trial to be made: its settings and its purpose."""

    settings: Settings
    purpose: Literal["start", "search", "verify"]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Space:
    """What may be tried. ``memory_bytes`` limits the RAM of a trial; ``allow`` names settings that change training.

    ``workers_stay``: another number of workers could change what is trained. ``may_persist``: persistent workers change
    nothing.
    """

    usable_cpus: float
    allow: frozenset[str] = frozenset()
    memory_bytes: int | None = None
    workers_stay: bool = False
    may_persist: bool = True

    @property
    def most_workers(self) -> int:
        """Twice the CPUs: workers that wait for storage may outnumber them, but more never paid."""
        return max(4, min(MOST_WORKERS, round(2 * self.usable_cpus)))

    @property
    def expected_workers(self) -> int:
        """The number to try first: half of the CPUs, but two at least: one does no more than the training thread."""
        return max(2, round(self.usable_cpus / 2))


def parse_allow(text: str) -> frozenset[str]:
    """The settings named in ``--allow``. Raises UsageError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - set(ALLOWABLE))
    if unknown:
        raise UsageError(f"--allow: there is no {', '.join(unknown)}", f"There are: {', '.join(ALLOWABLE)}")
    if "accumulation" in names and "batch" not in names:
        raise UsageError(
            "--allow accumulation changes the batch that the loader gives", "Allow both: --allow batch,accumulation"
        )
    return frozenset(names)


def is_unsplit_stream(loader: LoaderRecord | None) -> bool:
    """Whether a loader reads an IterableDataset of which each of several workers might give every sample."""
    return loader is not None and loader.iterable and loader.num_workers <= 1


def loader_settings(settings: Settings) -> Settings:
    """Only the part of settings that concerns the loader."""
    return Settings(**{name: getattr(settings, name) for name in LOADER_SETTINGS})


def is_loader_only(settings: Settings) -> bool:
    """Whether settings change nothing but the loader."""
    return settings == loader_settings(settings)


# --------------------------------------------------------------------------- the trials so far


def start_of(trials: Sequence[Trial]) -> Trial | None:
    """The trial of the unchanged script, once it was measured."""
    return next((trial for trial in trials if trial.purpose == "start" and is_valid(trial)), None)


def is_valid(trial: Trial) -> bool:
    """Whether a trial has a plausible rate."""
    return trial.state == "ok" and trial.samples_per_s is not None and POSSIBLE[0] < trial.samples_per_s < POSSIBLE[1]


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The fastest valid trial of the search."""
    valid = [trial for trial in trials if is_valid(trial) and trial.purpose != "verify"]
    return max(valid, key=rate, default=None)


def rate(trial: Trial) -> float:
    """Samples a second, 0 where none were measured."""
    return trial.samples_per_s or 0.0


def knee_of(trials: Sequence[Trial]) -> Trial | None:
    """The trial with the smallest batch whose rate is within 5 % of the best one."""
    valid = [trial for trial in trials if is_valid(trial) and trial.purpose != "verify" and trial.settings.batch_size]
    if not valid:
        return None
    top = max(map(rate, valid))
    return min((t for t in valid if rate(t) * KNEE >= top), key=lambda t: t.settings.batch_size or 0)


# --------------------------------------------------------------------------- memory as a straight line


def fit_line(points: Iterable[tuple[float, float]]) -> LinearRegression | None:
    """The least-squares line through points; None unless two of them differ in x."""
    known = list(points)
    return linear_regression(*zip(*known, strict=True)) if len({x for x, _ in known}) > 1 else None


def vram_line(trials: Iterable[Trial]) -> LinearRegression | None:
    """VRAM over the batch size."""
    return fit_line(
        (trial.in_force.batch_size, trial.vram_peak_bytes)
        for trial in trials
        if trial.state == "ok" and trial.in_force.batch_size is not None and trial.vram_peak_bytes is not None
    )


def most_within(line: LinearRegression | None, limit_bytes: float | None) -> int | None:
    """How many samples or workers fit; None where it is unknown, or memory does not grow with them."""
    if line is None or limit_bytes is None or line.slope <= 0:
        return None
    return max(0, int((limit_bytes - line.intercept) / line.slope))


def changes_data_set(source: str) -> int | None:
    """The line that sets an attribute of a data set in a loop, or calls its set_epoch anywhere; None without one.

    Persistent workers would not see the change. A trial is too short to show it, so the source is read.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    looped = {id(node) for loop in ast.walk(module) if isinstance(loop, ast.For | ast.While) for node in ast.walk(loop)}
    for node in ast.walk(module):
        match node:
            case ast.Expr(ast.Call(ast.Attribute(base, name))) if name.startswith("set_"):
                pass
            case ast.Assign([ast.Attribute(base, name), *_]) | ast.AugAssign(ast.Attribute(base, name)):
                pass
            case _:
                continue
        data = ast.unparse(base)
        is_data = data.endswith("dataset") or re.search(rf"DataLoader\((dataset=)?{re.escape(data)}\b", source)
        if is_data and (id(node) in looped or name == "set_epoch"):
            return node.lineno
    return None


def is_made_in_a_loop(source: str, line: int) -> bool:
    """Whether the code at this line is in the body of a loop: a loader made there may live for one epoch only."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    loops = (node for node in ast.walk(module) if isinstance(node, ast.For | ast.While))
    return any(loop.body[0].lineno <= line <= (loop.end_lineno or 0) for loop in loops)
