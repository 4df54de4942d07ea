"""How a run ended: the same words whether its job was attached to, recorded by hand, or left by a way of its own."""

from __future__ import annotations

from typing import Any

import pytest

from fulltilt.cli.ending import state_of
from fulltilt.errors import StoppedEarly
from fulltilt.timeline.run_files import ending_of


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (None, ("done", None, None)),
        (SystemExit(), ("done", 0, None)),
        (SystemExit(0), ("done", 0, None)),
        (SystemExit(7), ("crashed", 7, None)),
        (SystemExit("no data"), ("crashed", 1, None)),
        (KeyboardInterrupt(), ("interrupted", None, None)),
        (StoppedEarly("the time is up"), ("interrupted", 3, None)),
        (RuntimeError("shapes"), ("crashed", None, "RuntimeError")),
    ],
)
def test_what_left_the_block_says_how_the_run_ended(error: BaseException | None, ended: Any) -> None:
    assert ending_of(error) == ended


@pytest.mark.parametrize(
    ("status", "state"),
    [
        *[(0, "done"), (1, "crashed"), (3, "crashed"), (200, "crashed")],
        *[(-2, "interrupted"), (130, "interrupted")],
        *[(-9, "killed"), (-15, "killed"), (143, "killed"), (137, "killed")],
    ],
)
def test_a_status_says_how_the_job_ended(status: int, state: str) -> None:
    assert state_of(status) == state
