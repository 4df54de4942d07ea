"""How fast a trial is and how sure that is: rates over blocks of steps, with a confidence interval.

Steps follow each other too closely to count as independent (a loader hands over in bursts), blocks of them do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; beyond them the normal distribution's will do.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
Z_95 = 1.96


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps in a row: how many samples they trained, how long they took, how long of it they waited for data.

    ``from_queue``: how many of the samples lay ready before the first of these steps; negative where more lay ready
    afterwards.
    """

    samples: int
    seconds: float
    wait_s: float = 0.0
    steps: int = 1
    from_queue: float = 0.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples per second with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def relative_error(self) -> float:
        """Half the interval over the mean."""
        return (self.high - self.low) / (2 * self.mean) if self.mean > 0 else math.inf


def t_quantile(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    return _T_95[degrees - 1] if 1 <= degrees <= len(_T_95) else Z_95


def lasting(blocks: Sequence[Block]) -> list[float]:
    """The samples of each block at the pace that the loader can keep: those that it made during the block.

    While the queue is used up, training takes more than that. A queue that grows or stays full says that it is training
    that sets the pace. One step's samples more or less in the queue are chance.
    """
    used_up = sum(block.from_queue for block in blocks)
    one_step = sum(block.samples for block in blocks) / max(sum(block.steps for block in blocks), 1)
    if used_up <= one_step:
        return [float(block.samples) for block in blocks]
    return [block.samples - block.from_queue for block in blocks]


def wait_share_of(blocks: Sequence[Block]) -> float | None:
    """The share of its time that training waits for data at the pace that lasts; None without any measured time."""
    seconds, samples = sum(block.seconds for block in blocks), sum(block.samples for block in blocks)
    if seconds <= 0:
        return None
    busy = 1 - sum(block.wait_s for block in blocks) / seconds
    return 1 - busy * (sum(lasting(blocks)) / samples if samples else 1.0)


def rate_of(blocks: Sequence[Block]) -> Rate | None:
    """Samples over seconds at the pace that lasts, with the interval of that ratio; None without any measured time.

    A single block says nothing about how sure it is: its interval is unbounded above and begins at zero.
    """
    seconds = sum(block.seconds for block in blocks)
    if seconds <= 0:
        return None
    given = lasting(blocks)
    mean = sum(given) / seconds
    count = len(blocks)
    if count < 2:
        return Rate(mean, 0.0, math.inf)
    spread = sum((samples - mean * block.seconds) ** 2 for samples, block in zip(given, blocks, strict=True))
    error = math.sqrt(spread / (count * (count - 1))) / (seconds / count)
    half = t_quantile(count - 1) * error
    return Rate(mean, max(0.0, mean - half), mean + half)


@dataclass(frozen=True, slots=True)
class Patience:
    """When a trial has measured enough.

    ``least_blocks``: fewer agree by chance. ``wanted_error`` is half an interval. ``most_s`` ends a trial whose rate
    will not settle; its wide interval then tells so. ``to_beat`` is a rate that a trial must reach to matter.
    """

    wanted_error: float = 0.025
    least_blocks: int = 5
    least_s: float = 1.5
    most_s: float = 8.0
    block_s: float = 0.25
    to_beat: float | None = None


def is_enough(blocks: Sequence[Block], patience: Patience) -> bool:
    """Whether the rate is known well enough, or will not be within this trial's patience."""
    seconds = sum(block.seconds for block in blocks)
    if seconds >= patience.most_s:
        return True
    if len(blocks) < patience.least_blocks or seconds < patience.least_s:
        return False
    rate = rate_of(blocks)
    if rate is None:
        return False
    out_of_the_race = patience.to_beat is not None and rate.high < patience.to_beat
    return out_of_the_race or rate.relative_error <= patience.wanted_error


def is_warm(steps: int, has_waited: bool, is_ahead: bool, batches: int, most_batches: int) -> bool:
    """Whether what follows is the pace that the job will keep.

    The first steps are slow, and the batches that the workers had queued meanwhile are consumed faster than the loader
    gives: until a step has waited for data. A loader that ``is_ahead`` of the training will not let it wait. Where
    neither is seen within ``most_batches``, the queue is used up so slowly that its share can be counted.
    """
    return steps >= WARM_UP_STEPS and (has_waited or is_ahead or batches > most_batches)


WARM_UP_STEPS = 3
