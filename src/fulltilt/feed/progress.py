"""A progress bar on a terminal, such as while samples are decoded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from fulltilt.report.console import can_redraw

Item = TypeVar("Item")


def progress(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """``items``, counted by a bar on stderr if that is a terminal."""
    if not can_redraw(sys.stderr):
        return iter(items)
    from rich.console import Console
    from rich.progress import track

    return iter(track(items, label, total, console=Console(stderr=True), transient=True))
