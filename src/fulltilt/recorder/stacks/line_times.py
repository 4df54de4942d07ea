"""Seconds by line of code, added up from stack samples, and the lines that cost more and more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fulltilt.recorder.marks import Totals
from fulltilt.recorder.stacks.frames import StackView
from fulltilt.records import HotLine

Call = tuple[str | None, bool, str | None]
MOST_LINES = 4096
FEWEST_STEPS = 16  # from which on early and late steps differ by more than chance


class LineTimes:
    """Adds up seconds by line and shows each with its costliest call; when full, the cheaper half is dropped."""

    def __init__(self) -> None:
        # For each line what its calls cost; a call is its text, whether it waits, and what it is inside of.
        self._lines: dict[tuple[str, str], Totals[Call]] = {}

    def add(self, view: StackView, seconds: float) -> None:
        """Charge a line with some seconds."""
        self.charge(view.where, view.function, seconds, view.call, view.waits, view.inside)

    def charge(
        self,
        where: str,
        function: str,
        seconds: float,
        call: str | None = None,
        waits: bool = False,
        inside: str | None = None,
    ) -> None:
        """Charge a line, given by its parts."""
        key = (where, function)
        if key not in self._lines and len(self._lines) >= MOST_LINES:
            self._lines = dict(self._ranked()[: MOST_LINES // 2])
        self._lines.setdefault(key, Totals())[call, waits, inside] += seconds

    def merge(self, lines: Iterable[HotLine]) -> None:
        """Add lines that another process measured."""
        for line in lines:
            self.charge(line.where, line.function, line.seconds, line.call, line.waits, line.inside)

    def take(self) -> tuple[HotLine, ...]:
        """The costliest lines so far; starts again from nothing."""
        top = self.top(20)
        self._lines.clear()
        return top

    def top(self, most: int = 12, scale: float = 1.0) -> tuple[HotLine, ...]:
        """The costliest lines, first the costliest, their seconds times ``scale``."""
        found = []
        for key, calls in self._ranked()[:most]:
            texts: Totals[tuple[str | None, bool]] = Totals()
            insides: Totals[str | None] = Totals()
            for (text, waits, inside), seconds in calls.items():
                texts[text, waits] += seconds
                insides[inside] += seconds
            costliest = max(texts, key=lambda call: (call[0] is not None, texts[call]))
            # The function that is called first: the innermost ones may be so many that each has little.
            called: Totals[str] = Totals()
            for inside, seconds in insides.items():
                called[_called(inside)] += seconds
            within = max(insides, key=lambda inside: (called[_called(inside)], insides[inside]))
            found.append(HotLine(*key, sum(calls.values()) * scale, *costliest, within))
        return tuple(found)

    def by_line(self) -> dict[tuple[str, str], float]:
        """The seconds of each line and its function."""
        return {key: sum(calls.values()) for key, calls in self._lines.items()}

    def _ranked(self) -> list[tuple[tuple[str, str], Totals[Call]]]:
        return sorted(self._lines.items(), key=lambda item: (-sum(item[1].values()), item[0]))


def _called(inside: str | None) -> str:
    """The first of the two functions that a line is inside of; empty for none."""
    return (inside or "").partition(" ")[0]


class LineGrowth:
    """Which lines cost more lately than at first: totals are kept at each doubling of the steps (or batches)."""

    def __init__(self, lines: LineTimes) -> None:
        self._lines = lines
        self._first = self._last = (0, dict[tuple[str, str], float]())

    def note(self, steps: int) -> None:
        """So many steps have passed."""
        if steps >= 2 * max(self._last[0], FEWEST_STEPS // 2):
            self._first, self._last = self._last, (steps, self._lines.by_line())

    def top(self, steps: int) -> tuple[HotLine, ...]:
        """The three lines that grew most, and what they cost since beyond what they had cost before."""
        before, early = self._first
        later = steps - before
        if not before or later <= 0:
            return ()
        ratio = later / before
        grown = []
        for line in self._lines.top(64):
            at_first_s = early.get((line.where, line.function), 0.0)
            grown.append((line.seconds - at_first_s * (1 + ratio), line))
        grown.sort(key=lambda one: -one[0])
        return tuple(replace(line, seconds=seconds) for seconds, line in grown[:3] if seconds > 0)
