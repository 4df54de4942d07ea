"""The marks that the training thread leaves behind: what it began to do, when, and where the GPU stood.

The training thread only appends marks. Everything else (pairing, attribution, files) happens on the observer thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple


class Activity(IntEnum):
    """What the training thread is doing. USER is everything that is not one of the others."""

    USER = 0
    NEXT = 1  # waiting in a loader's next()
    ITER = 2  # creating a loader's iterator: worker processes start here
    BACKWARD = 3
    OPTIMIZER = 4
    SAVE = 5  # torch.save and its like
    SYNC = 6  # blocked until the GPU has finished: .item(), .cpu(), synchronize()
    COPY = 7  # host to GPU copies
    COMM = 8  # explicit collectives
    OBSERVE = 9  # Fulltilt's own work on this thread
    REST = 10  # not looked at in detail: short steps between two bursts of measuring


class Point(IntEnum):
    """A boundary at which the GPU's position is worth an event."""

    NONE = 0
    BATCH = 1  # a training batch has arrived
    BACKWARD = 2  # backward begins
    STEP = 3  # an optimizer has stepped
    COPY = 4  # a copy to the GPU has been queued, or is done
    EVAL = 5  # evaluation begins or ends
    DELAY = 6  # a calibrating delay has been queued
    SYNCED = 7  # a blocking call begins while calibrating: all that it waits for has been queued


class Mark(NamedTuple):
    """From ``t_ns`` on the training thread does ``activity``; ``fact`` says what happened at this boundary.

    ``activity`` is None when another thread leaves a fact behind: the training thread goes on with what it does.
    """

    t_ns: int
    activity: Activity | None
    fact: Any = None
    point: Point = Point.NONE
    event: Any = None


class BatchArrived(NamedTuple):
    """next() returned a batch. ``samples`` is None when the batch has no countable structure.

    ``doubtful``: only the model's mode speaks for evaluation, gradients are on.
    """

    loader_id: int
    samples: int | None
    evaluating: bool
    first: bool
    workers: int
    doubtful: bool = False


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
    """An optimizer's step ended; ``skipped`` when the gradient scaler left it out."""

    optimizer_id: int
    skipped: bool


class Rested(NamedTuple):
    """The recorder has rested for so many optimizer calls; ``drawn`` are batches and samples meanwhile, by loader."""

    calls: int
    drawn: Mapping[int, tuple[int, int]]


class BookedApart(NamedTuple):
    """So much of the time at rest was not spent as usual: it has been booked on a shelf of its own."""

    shelf: str
    ns: int


class EpochBegan(NamedTuple):
    """The trainer says that this epoch begins."""

    number: int


class EvalMode(NamedTuple):
    """The trained model was switched to evaluation mode, or back."""

    on: bool


class Finished(NamedTuple):
    """The job is over."""
