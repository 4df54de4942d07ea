"""Exchanging a function of a module or class for one around it, and putting the original back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fulltilt.recorder.marks import Activity
from fulltilt.recorder.recorder import Recorder

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


def timed(recorder: Recorder, original: Callable[..., Any], activity: Activity) -> Callable[..., Any]:
    """``original``, marked as ``activity`` while it runs on the training thread outside of any other."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.mine() or recorder.activity is not Activity.USER:
            return original(*args, **kwargs)
        before = recorder.switch(activity)
        try:
            return original(*args, **kwargs)
        finally:
            recorder.switch(before)

    return call
