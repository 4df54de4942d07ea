"""Who observes the batches of Fulltilt's own loaders: the recorder sets ``observe`` while it records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

# Called with a loader and the batches of one pass over it; returns the batches, observed.
observe: Callable[[Any, Iterator[Any]], Iterator[Any]] | None = None


def observed(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """``batches``, observed if a recorder is at work."""
    return batches if observe is None else observe(loader, batches)
