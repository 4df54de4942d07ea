"""Where a trial stood at the end of a step, and what lies between two such moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fulltilt.tuning.interval import Block

# A step that waited at least this long, and this share of its time, found the loader's queue empty.
WAITED_S = 0.002
WAITED_SHARE = 0.05


@dataclass(slots=True)
class Moment:
    """Where the job stood at the end of a step; ``event`` says when the GPU got there.

    ``queue_batches`` is what the loader's queue can hold, ``ready`` how many batches lay in it.
    """

    host_s: float
    steps: int
    batches: int
    samples: int
    wait_s: float
    interruptions: int = 0
    workers: int = 0
    queue_batches: int = 0
    ready: int = 0
    event: Any = None


def block_between(began: Moment, ended: Moment) -> Block:
    """What was trained between two moments; by the GPU's clock where both have an event, which it must have reached."""
    if began.event is not None and ended.event is not None:
        seconds = float(began.event.elapsed_time(ended.event)) * 1e-3
    else:
        seconds = ended.host_s - began.host_s
    samples, batches = ended.samples - began.samples, ended.batches - began.batches
    return Block(
        samples=samples,
        seconds=seconds,
        wait_s=min(ended.wait_s - began.wait_s, seconds),
        steps=ended.steps - began.steps,
        from_queue=(began.ready - ended.ready) * samples / batches if batches else 0.0,
    )


def waited_between(last: Moment, now: Moment) -> bool:
    """Whether a step found the loader's queue empty."""
    waited_s = now.wait_s - last.wait_s
    return waited_s >= WAITED_S and waited_s >= WAITED_SHARE * (now.host_s - last.host_s)
