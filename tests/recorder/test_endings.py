"""How a run ended: the same words whether its job was attached to, recorded by hand, or left by a way of its own."""

from __future__ import annotations

from typing import Any

import pytest

from fulltilt.cli.run import state_of
from fulltilt.errors import StoppedEarly
from fulltilt.recorder.manual_recording import ending_of


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
    ("status", "by_itself", "state"),
    [
        *[(0, True, "done"), (1, True, "crashed"), (3, False, "crashed"), (200, False, "crashed")],
        *[(-2, True, "interrupted"), (130, True, "interrupted")],
        *[(-9, False, "killed"), (-15, True, "killed"), (143, False, "killed"), (137, False, "killed")],
        (143, True, "crashed"),  # sys.exit(143): nobody killed it
    ],
)
def test_a_status_says_how_the_job_ended(status: int, by_itself: bool, state: str) -> None:
    assert state_of(status, by_itself) == state
