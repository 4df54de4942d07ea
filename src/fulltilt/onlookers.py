"""Who looks on as batches leave a loader of Fulltilt's own: the recorder sets ``look`` while it records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

# Called with a loader and the batches of one pass over it; returns the batches, observed.
look: Callable[[Any, Iterator[Any]], Iterator[Any]] | None = None


def seen(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """``batches``, past whoever looks on."""
    return batches if look is None else look(loader, batches)
