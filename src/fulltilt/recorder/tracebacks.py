"""Tracebacks without frames of ours: an error of the job's passes through them wherever we stand in torch's way.

One that begins in our own code keeps them all: it may be our mistake.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import TracebackType

PACKAGE = Path(__file__).parents[1]
# Only what stands between the script and torch. A script may well call the rest of Fulltilt itself.
BETWEEN = (str(PACKAGE / "recorder"), str(PACKAGE / "tuning" / "live"))


def leave_out_ours(error: BaseException | None) -> None:
    """Take our frames out of the traceback of an error, and of those that it came from."""
    seen: set[int] = set()
    errors = [error]
    while errors:
        error = errors.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        error.__traceback__ = _without_ours(error.__traceback__)
        errors += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    steps: list[TracebackType] = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    if not steps or _is_ours(steps[-1].tb_frame.f_code.co_filename):
        return steps[0] if steps else None
    for step in reversed(steps):
        if not _is_ours(step.tb_frame.f_code.co_filename):
            step.tb_next = trace
            trace = step
    return trace


@cache
def _is_ours(filename: str) -> bool:
    return filename.startswith(BETWEEN)
