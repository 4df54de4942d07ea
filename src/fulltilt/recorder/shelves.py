"""Nanoseconds sorted by what they were spent on, before they become the ledger's buckets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from fulltilt.recorder.marks import Activity

# Where time of an activity goes, by its number. USER time is split later by what the looks at the stack saw in it.
SHELF = {
    Activity.USER: "user",
    Activity.NEXT: "data_wait",
    Activity.ITER: "turnover",
    Activity.BACKWARD: "backward",
    Activity.OPTIMIZER: "optimizer",
    Activity.SAVE: "checkpoint",
    Activity.SYNC: "sync",
    Activity.COPY: "transfer",
    Activity.COMM: "communication",
    Activity.OBSERVE: "observer",
    Activity.REST: "rest",
}
PHASE = {
    Activity.USER: "user",
    Activity.NEXT: "load",
    Activity.BACKWARD: "backward",
    Activity.OPTIMIZER: "optimizer",
    Activity.COPY: "transfer",
    Activity.REST: "rest",  # not a phase: the measured steps stand for what was not looked at
}
Key = TypeVar("Key")
PHASE_OF_SHELF = {SHELF[activity]: phase for activity, phase in PHASE.items()}


@dataclass
class Shelves:
    """Nanoseconds by shelf, with the host's own phases of a step beside them.

    ``user_after`` is the user's own time by what came before it: behind a batch comes another code than behind a step.
    """

    time: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    user_after: dict[Activity, float] = field(default_factory=dict)

    def put(self, shelf: str, ns: float) -> None:
        """Book time on a shelf."""
        if ns:
            self.time[shelf] = self.time.get(shelf, 0.0) + ns

    def phase(self, name: str, ns: float) -> None:
        """Book host time of a phase of the step."""
        if ns:
            self.phases[name] = self.phases.get(name, 0.0) + ns

    def user(self, after: Activity, ns: float) -> None:
        """Note what the user's own time came after."""
        if ns:
            self.user_after[after] = self.user_after.get(after, 0.0) + ns

    def copy(self) -> Shelves:
        """The same again, to be kept."""
        return Shelves(dict(self.time), dict(self.phases), dict(self.user_after))

    def beyond(self, earlier: Shelves) -> Shelves:
        """What has been booked since there was only ``earlier``."""
        return Shelves(
            _beyond(self.time, earlier.time),
            _beyond(self.phases, earlier.phases),
            _beyond(self.user_after, earlier.user_after),
        )

    def move(self, source: str, target: str, ns: float) -> None:
        """Move up to ``ns`` from one shelf to another."""
        moved = min(ns, self.time.get(source, 0.0))
        if moved > 0:
            self.time[source] -= moved
            self.put(target, moved)


def _beyond(now: dict[Key, float], earlier: dict[Key, float]) -> dict[Key, float]:
    return {name: ns - earlier.get(name, 0.0) for name, ns in now.items() if ns != earlier.get(name, 0.0)}
