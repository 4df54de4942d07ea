"""The assignment and the answer of a trial; blocks of steps, and the rate over them with its interval.

Single steps are not independent measurements: a loader with w workers delivers batches in bursts of w. So a block ends
after a whole number of bursts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pvariance
from typing import Any

from fulltilt.records import LoaderRecord, Settings

# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; beyond them that of the normal distribution.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
Z_95 = 1.96

ASSIGNMENT = "FULLTILT_TRIAL"
ASSIGNMENT_FILE = "assignment.json"
ANSWER_FILE = "answer.json"


@dataclass(frozen=True, slots=True)
class StepBlock:
    """Consecutive steps: their samples, their time, and how long of it they waited for data.

    ``from_queue``: by how many samples the loader's queue shrank during these steps; negative where it grew.
    """

    samples: int
    seconds: float
    wait_s: float = 0.0
    steps: int = 1
    from_queue: float = 0.0


@dataclass(frozen=True, slots=True)
class Patience:
    """When a trial has measured enough.

    ``wanted_error`` is half of the interval, as a share of the rate. ``least_blocks``: fewer may agree by chance.
    ``most_s`` ends a trial whose rate does not settle. ``to_beat`` is the rate that a trial must reach to matter.
    """

    wanted_error: float = 0.025
    least_blocks: int = 5
    least_s: float = 1.5
    most_s: float = 8.0
    block_s: float = 0.25
    to_beat: float | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a trial is to do: the settings to apply to which loader, and when to stop. ``folder`` takes its records.

    ``loader`` is the training loader that the first trial saw, known by its line and the length of its data set.
    ``scratch``: where to redirect saves, if nothing else can be written.
    """

    settings: Settings
    folder: str
    scratch: str | None = None
    loader: LoaderRecord | None = None
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a trial measured. ``complete``: it stopped since the rate was known, not because the script ended.

    ``losses`` end before the first that is not finite, that of step ``not_finite_at``.
    """

    blocks: tuple[StepBlock, ...] = ()
    steps: int = 0
    losses: tuple[float, ...] = ()
    complete: bool = False
    not_finite_at: int | None = None
    out_of_memory: int = 0
    remarks: tuple[str, ...] = ()


# --------------------------------------------------------------------------- the rate over blocks


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples per second with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def _lasting(blocks: Sequence[StepBlock]) -> list[float]:
    """The samples that the loader made during each block.

    While its queue drains, training consumes more than that. Where the queue grows or stays full, training is the
    limit and its samples count. One step's samples more or less in the queue are chance.
    """
    used_up = sum(block.from_queue for block in blocks)
    one_step = sum(block.samples for block in blocks) / max(sum(block.steps for block in blocks), 1)
    return [block.samples - (block.from_queue if used_up > one_step else 0.0) for block in blocks]


def wait_share_of(blocks: Sequence[StepBlock]) -> float | None:
    """The share of time that training waits for data at the loader's lasting rate; None without measured time."""
    seconds, samples = sum(block.seconds for block in blocks), sum(block.samples for block in blocks)
    if seconds <= 0:
        return None
    busy = 1 - sum(block.wait_s for block in blocks) / seconds
    return 1 - busy * (sum(_lasting(blocks)) / samples if samples else 1.0)


def rate_of(blocks: Sequence[StepBlock]) -> Rate | None:
    """The lasting rate with its interval; None without measured time.

    The interval of a single block is unbounded: from zero to infinity.
    """
    seconds, count = sum(block.seconds for block in blocks), len(blocks)
    if seconds <= 0:
        return None
    given = _lasting(blocks)
    mean = sum(given) / seconds
    if count < 2:
        return Rate(mean, 0.0, math.inf)
    spread = sum((samples - mean * block.seconds) ** 2 for samples, block in zip(given, blocks, strict=True))
    error = math.sqrt(spread / (count * (count - 1))) / (seconds / count)
    half = (_T_95[count - 2] if count - 2 < len(_T_95) else Z_95) * error
    return Rate(mean, max(0.0, mean - half), mean + half)


def is_enough(blocks: Sequence[StepBlock], patience: Patience) -> bool:
    """Whether the rate is known well enough, or the trial has lasted long enough."""
    seconds = sum(block.seconds for block in blocks)
    if seconds >= patience.most_s:
        return True
    rate = rate_of(blocks)
    if len(blocks) < patience.least_blocks or seconds < patience.least_s or rate is None:
        return False
    out_of_the_race = patience.to_beat is not None and rate.high < patience.to_beat
    return out_of_the_race or rate.high - rate.low <= 2 * patience.wanted_error * rate.mean


# --------------------------------------------------------------------------- from steps to blocks

WARM_UP_STEPS = 3
# A step that waited at least this long, and this share of its time, found the queue empty.
WAITED_S = 0.002
WAITED_SHARE = 0.05
# After this many interruptions without a whole block between them, they count as part of training.
MOST_FRUITLESS = 4
# A full queue drains within this many times its length, unless the loader is nearly as fast as training.
USED_UP_WITHIN = 2


@dataclass(slots=True)
class StepSnapshot:
    """The counters at the end of a step. ``event``: a CUDA event, for when the GPU got there.

    ``queue_batches`` is the capacity of the loader's queue, ``ready`` how many batches it held.
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


def block_between(began: StepSnapshot, ended: StepSnapshot) -> StepBlock:
    """The block between two snapshots; by the GPU's clock where both have an event, which must have completed."""
    if began.event is not None and ended.event is not None:
        seconds = float(began.event.elapsed_time(ended.event)) * 1e-3
    else:
        seconds = ended.host_s - began.host_s
    samples, batches = ended.samples - began.samples, ended.batches - began.batches
    return StepBlock(
        samples=samples,
        seconds=seconds,
        wait_s=min(ended.wait_s - began.wait_s, seconds),
        steps=ended.steps - began.steps,
        from_queue=(began.ready - ended.ready) * samples / batches if batches else 0.0,
    )


class BlockTimer:
    """Cuts steps into blocks. ``marked`` is called with the snapshots at which a block begins or ends."""

    def __init__(self, block_s: float, marked: Callable[[StepSnapshot], StepSnapshot] = lambda moment: moment) -> None:
        self._block_s = block_s
        self._marked = marked
        self._last: StepSnapshot | None = None
        self._began: StepSnapshot | None = None
        self._cold_since: StepSnapshot | None = None
        self._has_waited = False
        self._fruitless = 0

    def stepped(self, now: StepSnapshot) -> tuple[StepSnapshot, StepSnapshot] | None:
        """The snapshots at the beginning and the end of a block that ends with this step; None when none does."""
        last, self._last = self._last, now
        if last is None:
            return None
        if now.interruptions != last.interruptions and self._fruitless < MOST_FRUITLESS:
            # During a validation or a save the workers filled the queue: wait until that is used up.
            self._fruitless += 1
            self._cold_since, self._began, self._has_waited = now, None, False
            return None
        waited_s = now.wait_s - last.wait_s
        self._has_waited |= waited_s >= WAITED_S and waited_s >= WAITED_SHARE * (now.host_s - last.host_s)
        if self._began is None:
            if self._is_warm(now):
                self._began = self._marked(now)
            return None
        began = self._began
        bursts, before = ((moment.batches - began.batches) // max(now.workers, 1) for moment in (now, last))
        if now.host_s - began.host_s < self._block_s or bursts == before:
            return None
        self._began = self._marked(now)
        if self._fruitless < MOST_FRUITLESS:
            self._fruitless = 0
        return began, self._began

    def _is_warm(self, now: StepSnapshot) -> bool:
        """Whether the following steps have a lasting rate.

        The first steps are slow; then the batches that workers queued meanwhile are consumed faster than the loader
        makes them, until a step waits for data. With a loader that is ahead of training, none will. Where neither is
        seen for long, the queue drains so slowly that ``from_queue`` accounts for it.
        """
        cold = self._cold_since
        batches = now.batches - (0 if cold is None else cold.batches)
        # Once each worker has had work, an idle worker means that the loader is ahead of training.
        is_ahead = batches > now.workers and now.ready > now.queue_batches - now.workers
        most_batches = USED_UP_WITHIN * now.queue_batches if cold is None else now.workers
        return now.steps >= WARM_UP_STEPS and (self._has_waited or is_ahead or batches > most_batches)


def ready_batches(iterator: Any) -> int:
    """Batches that workers have made and nobody has taken yet; 0 without workers, and where that is unknown.

    Private in torch's iterator, the same from torch 2.8 to 2.15: ``_task_info`` (holds batches that arrived out of
    order), ``_worker_result_queue``, and ``_data_queue``, another queue where a thread pins.
    """
    try:
        before_their_turn = sum(len(task) > 1 for task in list(iterator._task_info.values()))
        queues = {id(queue): queue for queue in (iterator._worker_result_queue, iterator._data_queue)}
        return before_their_turn + sum(int(queue.qsize()) for queue in queues.values())
    except (AttributeError, NotImplementedError, OSError, RuntimeError):  # other iterators; macOS; a closed queue
        return 0


# --------------------------------------------------------------------------- losses of two trials compared

# Fewer common steps say nothing.
LEAST_STEPS = 10
# A loss higher by less than this share is no divergence: summing in another order changes less, diverging more.
TOLERATED = 0.05
# And one higher by less than this many standard errors is chance.
SURE_ERRORS = 4.0


def worse_by(start: Sequence[float], other: Sequence[float]) -> str | None:
    """In words, how much higher the losses of ``other`` are than those of ``start``; None within the noise.

    Compares the later half of the steps that both made.
    """
    common = min(len(start), len(other))
    if common < LEAST_STEPS:
        return None
    ours, theirs = start[common // 2 : common], other[common // 2 : common]
    before, after = fmean(ours), fmean(theirs)
    error = math.sqrt((pvariance(ours) + pvariance(theirs)) / len(ours))
    if after - before <= max(SURE_ERRORS * error, TOLERATED * abs(before)):
        return None
    return f"mean loss of steps {common // 2 + 1} to {common}: {after:.4g}, at the start settings {before:.4g}"
