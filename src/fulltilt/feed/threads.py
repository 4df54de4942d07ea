"""Threads that read ahead are ended before the interpreter is.

One that still copies to the GPU when the interpreter is torn down takes the process down with it.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable

_ends: list[Callable[[], object]] = []


def end_at_exit(end: Callable[[], object]) -> Callable[[], None]:
    """Let ``end`` be called when the interpreter ends; returns what takes that back."""
    _ends.append(end)

    def forget() -> None:
        with contextlib.suppress(ValueError):
            _ends.remove(end)

    return forget


@atexit.register
def _end_all() -> None:
    for end in list(_ends):
        with contextlib.suppress(Exception):
            end()
