"""A bar while samples are decoded ahead of training; nothing where the output is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Iterable[Item], total: int, label: str, *, shown: bool | None = None) -> Iterator[Item]:
    """``items``, with a bar on stderr that counts them. ``shown`` None: only on a terminal."""
    if shown is None:
        shown = sys.stderr.isatty()
    if not shown:
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        for item in items:
            yield item
            bar.advance(task)
