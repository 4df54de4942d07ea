"""From the first line of a trial's script on: files are guarded before torch is imported and before a log is opened."""

from __future__ import annotations

import os
from pathlib import Path

from fulltilt.tuning.assignment import ASSIGNMENT
from fulltilt.tuning.saves import Saves

SCRATCH = "FULLTILT_SCRATCH"

_guard: Saves | None = None


def begin() -> None:
    """Called by the timeline as the process starts; where it raises, no line of the script runs."""
    global _guard
    assigned, of_study = os.environ.get(ASSIGNMENT), Path(os.environ[SCRATCH])
    _guard = Saves(Path(assigned).parent / "scratch" if assigned else of_study, of_study.parent)
    _guard.install()


def taken_over() -> Saves | None:
    """The guards that are in place already, for whoever goes on with them; None where there are none."""
    global _guard
    guard, _guard = _guard, None
    return guard


def handed_on(guard: Saves) -> None:
    """Leave guards in place for the forks: what a script has imported by name are these, and no later ones."""
    global _guard
    _guard = guard
