"""The terminal that the verbs print on."""

from __future__ import annotations

import contextlib
import io
import sys

from rich.console import Console


def open_console() -> Console:
    """Standard output as a console. What its encoding lacks is printed as ``?``, never as a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False, emoji=False, markup=False)
