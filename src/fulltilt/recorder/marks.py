"""The marks of the training thread: what it began to do, when, and the GPU's event for that moment.

The training thread only appends marks. Everything else (pairing, attribution, files) happens on the observer's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar


class Activity(IntEnum):
    """What the training thread is doing. USER is everything that is not one of the others."""

    USER = 0
    DATA_WAIT = 1  # waiting in a loader's next()
    EPOCH_TURNOVER = 2  # creating a loader's iterator: worker processes start here
    BACKWARD = 3
    OPTIMIZER = 4
    CHECKPOINT = 5  # torch.save and its like
    SYNC = 6  # blocked until the GPU has finished: .item(), .cpu(), synchronize()
    TRANSFER = 7  # host to GPU copies
    COMMUNICATION = 8  # explicit collectives
    OBSERVER = 9  # Fulltilt's own work on this thread
    COMPILE = 10  # torch.compile compiles
    GARBAGE_COLLECTION = 11  # a full one
    PAUSED = 12  # short steps between two measured bursts, only counted
    LONG_USER = 13  # USER of a job on a GPU, too long for launching kernels


class Point(IntEnum):
    """A boundary at which the GPU's position is worth an event."""

    NONE = 0
    BATCH = 1  # a training batch has arrived
    BACKWARD = 2  # backward begins
    STEP = 3  # an optimizer has stepped
    TRANSFER = 4  # a copy to the GPU has been queued, or is done
    EVAL = 5  # evaluation begins or ends
    DELAY = 6  # a calibrating delay has been queued
    SYNCED = 7  # a blocking call begins while calibrating: all that it waits for has been queued


class Mark(NamedTuple):
    """From ``t_ns`` on the training thread does ``activity``; ``fact`` says what happened at that moment.

    ``activity`` is None for a fact from another thread: the training thread's activity goes on.
    """

    t_ns: int
    activity: Activity | None
    fact: Any = None
    point: Point = Point.NONE
    event: Any = None


class BatchArrived(NamedTuple):
    """next() returned a batch. ``samples`` is None when they cannot be counted."""

    loader_id: int
    samples: int | None
    evaluating: bool
    first: bool
    workers: int
    doubtful: bool = False  # the model is in evaluation mode, but gradients are on


class WaitBegan(NamedTuple):
    """next() is about to be called on a loader."""

    evaluating: bool


class PassEnded(NamedTuple):
    """A loader's iterator is exhausted."""

    loader_id: int
    evaluating: bool
    workers: int


class PassBegan(NamedTuple):
    """A loader's iterator is about to be created."""

    loader_id: int
    evaluating: bool


class BackwardBegan(NamedTuple):
    """backward() was called: the job trains."""


class BackwardEnded(NamedTuple):
    """backward() returned."""


class OptimizerStepped(NamedTuple):
    """An optimizer's step ended; ``skipped``: the gradient scaler left it out."""

    optimizer_id: int
    skipped: bool


class StepsCounted(NamedTuple):
    """A pause is over, with so many optimizer calls in it; ``drawn`` are its batches and samples, by loader."""

    calls: int
    drawn: Mapping[int, tuple[int, int]]


class BookedInPause(NamedTuple):
    """The stretch of a pause that just ended, a long wait for data or a long step, was booked as it is."""

    ns: int
    turnover: bool = False  # it was a wait for workers to end with their pass


class EpochBegan(NamedTuple):
    """The trainer has begun this epoch."""

    number: int


class EvalMode(NamedTuple):
    """The trained model was switched to evaluation mode, or back."""

    on: bool


class Finished(NamedTuple):
    """The job is over."""


# What the time of an activity is booked as: mostly a bucket without its ``_s``. "user" is split later by what the stack
# samples saw in it, "paused" as the measured steps divide. On a GPU there are also "gpu_busy" and "launching" (idle
# while the host queues kernels).
LABEL = {activity: activity.name.lower() for activity in Activity}
LABEL |= {Activity.COMPILE: "startup", Activity.GARBAGE_COLLECTION: "host_code"}
# The labels that are phases of a step; all others are one phase, "other".
PHASES = ("user", "data_wait", "backward", "optimizer", "transfer", "paused")
PHASE = {activity: label if label in PHASES else "other" for activity, label in LABEL.items()}
Key = TypeVar("Key")


class Totals(dict[Key, float]):
    """Sums by key; a missing key reads as 0.0 and is not added."""

    def __missing__(self, key: Key) -> float:
        return 0.0

    def beyond(self, earlier: Totals[Key]) -> Totals[Key]:
        """What has been added since ``earlier``."""
        return Totals({key: total - earlier[key] for key, total in self.items() if total != earlier[key]})


@dataclass
class ActivityTimes:
    """Nanoseconds by label, the host's by phase of a step, and the user's own by the activity that came before."""

    by_label: Totals[str] = field(default_factory=Totals)
    phases: Totals[str] = field(default_factory=Totals)
    user_after: Totals[Activity] = field(default_factory=Totals)

    def copy(self) -> ActivityTimes:
        """A copy."""
        return ActivityTimes(Totals(self.by_label), Totals(self.phases), Totals(self.user_after))

    def beyond(self, earlier: ActivityTimes) -> ActivityTimes:
        """What has been booked since ``earlier``."""
        return ActivityTimes(
            self.by_label.beyond(earlier.by_label),
            self.phases.beyond(earlier.phases),
            self.user_after.beyond(earlier.user_after),
        )

    def move(self, source: str, target: str, ns: float) -> None:
        """Move up to ``ns`` from one label to another."""
        moved = min(ns, self.by_label[source])
        if moved > 0:
            self.by_label[source] -= moved
            self.by_label[target] += moved
