"""Exchanging a function of a module or class for one around it, and putting the original back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# Makes the function that stands in, given the original.
Make = Callable[[Callable[..., Any]], Callable[..., Any]]


class Exchange:
    """What has been put in place of something else, and how to undo it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def swap(self, home: Any, name: str, make: Make) -> None:
        """Put ``make(original)`` in the place of ``home.name``."""
        own = name in vars(home)
        original = getattr(home, name)
        setattr(home, name, functools.wraps(original)(make(original)))
        self._undo.append(lambda: setattr(home, name, original) if own else delattr(home, name))

    def undo_by(self, undo: Callable[[], None]) -> None:
        """Remember how something that was put in place otherwise is taken out again."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Put every original back."""
        while self._undo:
            self._undo.pop()()
