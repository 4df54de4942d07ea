"""In every Python process of a trial, or of the process that trials are forked from: takes up its part."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.recorder.session import Session
from fulltilt.tuning.assignment import ASSIGNMENT, Assignment
from fulltilt.tuning.measuring import Measuring
from fulltilt.tuning.template import CHANNEL, Template


def attach(session: Session) -> None:
    """Called by the timeline when torch has been imported and its own patches are in place."""
    torch: Any = sys.modules["torch"]
    path = os.environ.get(ASSIGNMENT)
    if path:
        Measuring(session, torch, store.read_record(Path(path), Assignment)).install()
    elif os.environ.get(CHANNEL) and os.environ.get("FULLTILT_STUDY_PID") == str(os.getppid()):
        Template.of_environment(torch).install()
