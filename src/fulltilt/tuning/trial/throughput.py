"""What a trial is told and what it answers: steps cut into blocks, and the rate over them with its interval.

Steps follow each other too closely to count as independent: a loader with w workers gives its batches in bursts of w.
So a block ends where a whole number of bursts has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pvariance
from typing import Any

from fulltilt.records import LoaderRecord, Settings

# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; beyond them the normal distribution's will do.
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


@dataclass(frozen=True, slots=True)
class Assignment:
    """The settings to put in force, on which loader, and when to stop; ``folder`` takes the records.

    ``loader`` is the one that feeds the training, as the first trial saw it: known by its line and its data's length.
    ``scratch`` is where saves are pointed to where nothing else may be written.
    """

    settings: Settings
    folder: str
    scratch: str | None = None
    loader: LoaderRecord | None = None
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a trial measured. ``complete``: it stopped because it knew enough, not because the script ended.

    ``losses`` go up to the first that is not finite, which is that of step ``not_finite_at``.
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
    """The samples of each block at the pace that the loader can keep: those that it made during the block.

    While the queue is used up, training takes more than that. A queue that grows or stays full says that it is training
    that sets the pace. One step's samples more or less in the queue are chance.
    """
    used_up = sum(block.from_queue for block in blocks)
    one_step = sum(block.samples for block in blocks) / max(sum(block.steps for block in blocks), 1)
    return [block.samples - (block.from_queue if used_up > one_step else 0.0) for block in blocks]


def wait_share_of(blocks: Sequence[StepBlock]) -> float | None:
    """The share of its time that training waits for data at the pace that lasts; None without any measured time."""
    seconds, samples = sum(block.seconds for block in blocks), sum(block.samples for block in blocks)
    if seconds <= 0:
        return None
    busy = 1 - sum(block.wait_s for block in blocks) / seconds
    return 1 - busy * (sum(_lasting(blocks)) / samples if samples else 1.0)


def rate_of(blocks: Sequence[StepBlock]) -> Rate | None:
    """Samples over seconds at the pace that lasts, with the interval of that ratio; None without any measured time.

    A single block says nothing about how sure it is: its interval is unbounded above and begins at zero.
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
    """Whether the rate is known well enough, or will not be within this trial's patience."""
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
# A step that waited at least this long, and this share of its time, found the loader's queue empty.
WAITED_S = 0.002
WAITED_SHARE = 0.05
# After so many interruptions without a whole block between them, they are part of the pace of this job.
MOST_FRUITLESS = 4
# A queue is used up within so many times its length, unless the loader is nearly as fast as the training.
USED_UP_WITHIN = 2


@dataclass(slots=True)
class StepSnapshot:
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


def block_between(began: StepSnapshot, ended: StepSnapshot) -> StepBlock:
    """What was trained between two moments; by the GPU's clock where both have an event, which it must have reached."""
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
    """Cuts a job's steps into blocks. ``marked`` is called with the moments at which one begins or ends."""

    def __init__(self, block_s: float, marked: Callable[[StepSnapshot], StepSnapshot] = lambda moment: moment) -> None:
        self._block_s = block_s
        self._marked = marked
        self._last: StepSnapshot | None = None
        self._began: StepSnapshot | None = None
        self._cold_since: StepSnapshot | None = None
        self._has_waited = False
        self._fruitless = 0

    def stepped(self, now: StepSnapshot) -> tuple[StepSnapshot, StepSnapshot] | None:
        """Where the block that ends with this step began and ended; None when none ends here."""
        last, self._last = self._last, now
        if last is None:
            return None
        if now.interruptions != last.interruptions and self._fruitless < MOST_FRUITLESS:
            # Validation or a save came between, in which the workers went on: not the pace of training.
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
        """Whether what follows is the pace that the job will keep.

        The first steps are slow, and the batches that the workers had queued meanwhile are consumed faster than the
        loader gives: until a step has waited for data. A loader that is ahead of the training will not let it wait.
        Where neither is seen for long, the queue is used up so slowly that its share can be counted.
        """
        cold = self._cold_since
        batches = now.batches - (0 if cold is None else cold.batches)
        # Once each worker has been given something to do, one that has nothing to do is ahead of the training.
        is_ahead = batches > now.workers and now.ready > now.queue_batches - now.workers
        most_batches = USED_UP_WITHIN * now.queue_batches if cold is None else now.workers
        return now.steps >= WARM_UP_STEPS and (self._has_waited or is_ahead or batches > most_batches)


def ready_batches(iterator: Any) -> int:
    """Batches that workers have made and nobody has taken yet; 0 without workers, and where nobody can tell.

    Uses of torch's iterator, the same from torch 2.8 to 2.15: ``_task_info`` (with the data of what came before its
    turn), ``_worker_result_queue``, and ``_data_queue``, which is another one where a thread pins.
    """
    try:
        before_their_turn = sum(len(task) > 1 for task in list(iterator._task_info.values()))
        queues = {id(queue): queue for queue in (iterator._worker_result_queue, iterator._data_queue)}
        return before_their_turn + sum(int(queue.qsize()) for queue in queues.values())
    except (AttributeError, NotImplementedError, OSError, RuntimeError):  # other iterators; macOS; a closed queue
        return 0


# --------------------------------------------------------------------------- losses of two trials compared

# Fewer common steps than this say nothing.
LEAST_STEPS = 10
# Worse by less than this share is no breakage: another order of the same sums differs by less, a broken one by more.
TOLERATED = 0.05
# And worse by less than so many standard errors is chance.
SURE_ERRORS = 4.0


def worse_by(start: Sequence[float], other: Sequence[float]) -> str | None:
    """In words, how much worse ``other`` trains than ``start``; None where it is not clearly beyond the noise.

    The later half of the steps that both made is compared.
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
