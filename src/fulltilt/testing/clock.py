"""A clock that moves only when told to."""

from __future__ import annotations


class FakeClock:
    """Call it for the time in seconds; ``advance`` moves it."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """The time that it was set to."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move time forward."""
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self.now_s += seconds
