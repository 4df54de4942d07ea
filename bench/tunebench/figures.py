"""The figures of a tuning benchmark, written after each one, so that an aborted benchmark keeps them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from children import process_start_s


class Figures:
    """Figures by job and name. ``deadline_s`` counts from the start of the process, imports included."""

    def __init__(self, out: Path, deadline_s: float, known: dict[str, dict[str, Any]] | None = None) -> None:
        self._out = out
        self._began_s = process_start_s()
        self._deadline_s = deadline_s
        self.all = known or {}

    def note(self, job: str, **figures: Any) -> None:
        """Write figures down at once."""
        self.all.setdefault(job, {}).update(figures)
        for name, value in figures.items():
            shown = f"{value:,.3f}" if isinstance(value, float) else json.dumps(value)
            print(f"{self.passed_s:6.1f} s  {job:<5} {name:<32} {shown[:120]}", flush=True)
        self.write()

    def write(self) -> None:
        """Have everything on disk."""
        self._out.write_text(json.dumps(self.all, indent=1) + "\n")

    @property
    def passed_s(self) -> float:
        """Seconds since the process began."""
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._deadline_s - self.passed_s

    def has_time_for(self, job: str, what: str, seconds: float) -> bool:
        """Whether so many seconds are left; what is left out is noted."""
        if self.left_s >= seconds:
            return True
        self.note(job, **{f"{what}_left_out": f"{seconds:.0f} s were not left of {self._deadline_s:.0f}"})
        return False


# (figure, its target, whether it should be at least that)
TARGETS = (
    ("live_over_best_after_60_s", 0.95, True),
    ("live_cost_share_of_five_minutes", 0.03, False),
    ("study_over_best", 0.97, True),
    ("study_time_of_grid", 0.10, False),
)


def table(figures: dict[str, dict[str, Any]], jobs: list[str]) -> str:
    """The required figures of each job beside their targets."""
    lines = [f"{'':<34}{'target':>9}" + "".join(f"{job:>12}" for job in jobs)]
    for name, target, at_least in TARGETS:
        cells = []
        for job in jobs:
            value = figures.get(job, {}).get(name)
            met = value is not None and (value >= target if at_least else value <= target)
            cells.append(f"{'not run' if value is None else f'{value:.3f}' + (' ok' if met else ' !!'):>12}")
        lines.append(f"{name:<34}{('≥ ' if at_least else '≤ ') + f'{target:g}':>9}" + "".join(cells))
    return "\n".join(lines)
