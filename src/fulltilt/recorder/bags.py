"""Looks at the training thread, counted by what they saw: those of the present window, and those of the whole run."""

from __future__ import annotations

from dataclasses import dataclass, field

from fulltilt.recorder.attribution import Seen
from fulltilt.recorder.marks import Activity

# A window needs this many looks before its own split is trusted over that of the whole run.
ENOUGH_LOOKS = 20


@dataclass
class Bag:
    """Looks at one sort of the user's own time, by kind: those of the present window, and those before it."""

    enough: int
    window: dict[str, float] = field(default_factory=dict)
    in_window: int = 0
    overall: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, weight_s: float) -> None:
        """Put a look in."""
        self.window[kind] = self.window.get(kind, 0.0) + weight_s
        self.in_window += 1

    def split(self) -> dict[str, float]:
        """How this time divides, by the looks of the window, or of the whole run when they are few."""
        return dict(self.window) if self.in_window >= self.enough else self._all()

    def _all(self) -> dict[str, float]:
        kinds = self.overall.keys() | self.window.keys()
        return {kind: self.overall.get(kind, 0.0) + self.window.get(kind, 0.0) for kind in kinds}

    def empty(self) -> None:
        """The looks of the window have been used."""
        self.overall = self._all()
        self.window.clear()
        self.in_window = 0


class Bags:
    """Looks at the user's own time, in a bag for each activity that it came after."""

    def __init__(self) -> None:
        self._after: dict[Activity, Bag] = {}

    def add(self, after: Activity, kind: str, weight_s: float) -> None:
        """Put a look in."""
        self._after.setdefault(after, Bag(ENOUGH_LOOKS)).add(kind, weight_s)

    def split(self) -> Seen:
        """How this time divides."""
        return {after: bag.split() for after, bag in self._after.items()}

    @property
    def in_window(self) -> int:
        """How many looks there were in the present window."""
        return sum(bag.in_window for bag in self._after.values())

    @property
    def seen(self) -> bool:
        """Whether there ever was a look."""
        return bool(self._after)

    def empty(self) -> None:
        """The looks of the window have been used."""
        for bag in self._after.values():
            bag.empty()
