"""Whether one pass over a loader goes on after another has begun, as when a script peeks at its first batch.

torch has one iterator for all passes of a loader whose workers persist: the second pass would begin the first anew.
"""

from __future__ import annotations

import weakref
from typing import Any


class Overlap:
    """Told of every pass by torch's own iterator for it."""

    def __init__(self) -> None:
        self._latest: dict[int, weakref.ref[Any]] = {}
        self._overtaken: list[tuple[weakref.ref[Any], int]] = []
        self._seen = False

    def began(self, loader_id: int, source: Any) -> None:
        """A pass has begun."""
        self._look()
        before = self._latest.get(loader_id, lambda: None)()
        if before is not None and before is not source:  # a script whose own workers persist has one for all
            self._overtaken.append((weakref.ref(before), before._num_yielded))
        self._latest[loader_id] = weakref.ref(source)

    @property
    def seen(self) -> bool:
        """Whether a pass was drawn from after the next had begun."""
        self._look()
        return self._seen

    def _look(self) -> None:
        for reference, drawn in self._overtaken:
            source = reference()
            self._seen = self._seen or (source is not None and source._num_yielded != drawn)
        self._overtaken = [(reference, drawn) for reference, drawn in self._overtaken if reference() is not None]
