"""Time by source line: how much each line cost, kept to a bounded number of lines."""

from __future__ import annotations

from collections.abc import Iterable

from fulltilt.recorder.stacks import StackView
from fulltilt.records import HotLine

MOST_LINES = 4096


class LineTimes:
    """Adds up seconds by line. Memory is bounded: when full, the cheaper half is forgotten.

    A line that holds several calls is shown with the costliest of them.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], float] = {}
        # For each line what its calls cost, and whether they wait.
        self._calls: dict[tuple[str, str], dict[tuple[str | None, bool], float]] = {}

    def add(self, view: StackView, seconds: float) -> None:
        """Charge a line with some seconds."""
        self.charge(view.where, view.function, seconds, view.call, view.waits)

    def charge(self, where: str, function: str, seconds: float, call: str | None = None, waits: bool = False) -> None:
        """Charge a line, given by its parts."""
        key = (where, function)
        if key not in self._seconds and len(self._seconds) >= MOST_LINES:
            kept = sorted(self._seconds.items(), key=lambda item: -item[1])[: MOST_LINES // 2]
            self._seconds = dict(kept)
            self._calls = {kept_key: self._calls[kept_key] for kept_key, _ in kept}
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        calls = self._calls.setdefault(key, {})
        calls[call, waits] = calls.get((call, waits), 0.0) + seconds

    def merge(self, lines: Iterable[HotLine]) -> None:
        """Add lines that another process measured."""
        for line in lines:
            self.charge(line.where, line.function, line.seconds, line.call, line.waits)

    def take(self) -> tuple[HotLine, ...]:
        """The costliest lines so far; starts again from nothing."""
        top = self.top(20)
        self._seconds.clear()
        self._calls.clear()
        return top

    def top(self, most: int = 12, stretch: float = 1.0) -> tuple[HotLine, ...]:
        """The costliest lines, first the costliest, their seconds times ``stretch``."""
        ranked = sorted(self._seconds.items(), key=lambda item: (-item[1], item[0]))[:most]
        return tuple(HotLine(*key, seconds * stretch, *_costliest(self._calls[key])) for key, seconds in ranked)


def _costliest(calls: dict[tuple[str | None, bool], float]) -> tuple[str | None, bool]:
    """The call that cost most, if one is known at all."""
    return max(calls, key=lambda each: (each[0] is not None, calls[each]))
