"""Which optimizer calls make a step, and which batches went into it: pure bookkeeping over facts.

A step ends with an optimizer's step. Several optimizers in one iteration (a GAN) are one step: a new one begins once a
batch has been drawn since, or an optimizer that has stepped in it steps again. Batches that were drawn but never
trained on (an undeclared validation, a batch drawn ahead of an early break) are not counted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

# A job that calls backward this often and never an optimizer updates its weights by hand.
BACKWARDS_WITHOUT_OPTIMIZER = 64
# No loop draws more batches than this ahead of the one it trains on.
MOST_AHEAD = 64


@dataclass
class DrawnBatches:
    """The batches drawn from one loader in one pass, and how many of them backward has used up.

    Accelerate and Lightning draw one batch ahead, Hugging Face's Trainer all batches of an accumulated step and one
    more: a batch drawn before a backward need not be part of it. How many batches go into each backward shows over
    time; ``usual`` is their number in the pass before.
    """

    usual: int | None = None
    waiting: deque[int | None] = field(default_factory=deque)
    drawn: int = 0
    used: int = 0
    backwards: int = 0
    ended: bool = False

    def draw(self, samples: int | None) -> None:
        """A batch was drawn; ``samples`` is None when it cannot be counted."""
        self.waiting.append(samples)
        self.drawn += 1

    def use_up(self) -> list[int | None]:
        """A backward ran: the samples of each batch that it has used up."""
        self.backwards += 1
        # Only the second backward tells two batches each from one that was drawn ahead.
        usual = self.usual if self.usual is not None else 1 if self.backwards == 1 else self.drawn
        each = min(self.drawn // self.backwards, usual)
        due = each * self.backwards - self.used if each else len(self.waiting)
        due = min(max(due, len(self.waiting) - MOST_AHEAD, 0), len(self.waiting))
        self.used += due
        return [self.waiting.popleft() for _ in range(due)]

    def next_pass(self) -> DrawnBatches:
        """The same loader in its next pass."""
        return DrawnBatches(self.drawn // self.backwards if self.ended and self.backwards else self.usual)

    def forget(self, batches: int) -> None:
        """The last few batches were not for training."""
        for _ in range(min(batches, len(self.waiting))):
            self.waiting.pop()
            self.drawn -= 1


@dataclass
class StepCounter:
    """Takes facts in order and counts the batches and samples of each step."""

    drawn: dict[int, DrawnBatches] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    drawn_since_step: bool = False
    backwards: int = 0
    optimizer_seen: bool = False
    train_loaders: set[int] = field(default_factory=set)
    # How often each loader was drawn from since the last backward, the one drawn last, and those that fed it.
    _fresh: dict[int, int] = field(default_factory=dict)
    _last: int = -1
    _feeding: list[int] = field(default_factory=list)
    _unfed: set[int] = field(default_factory=set)
    _doubtful: dict[int, list[int | None]] = field(default_factory=dict)
    # Which of several loaders counts its samples, and batches for which that is not known yet.
    _counting: dict[tuple[int, ...], int] = field(default_factory=dict)
    _undecided: tuple[tuple[int, ...], dict[int, list[int | None]]] | None = None
    _batches: int = 0
    _samples: int | None = None

    def pass_began(self, loader_id: int) -> None:
        """A loader begins another pass. What is left of an abandoned one never trains."""
        before = self.drawn.pop(loader_id, None)
        if before is not None:
            if before.ended and before.backwards:
                self._count(list(before.waiting))
            self.drawn[loader_id] = before.next_pass()
        self._fresh.pop(loader_id, None)
        self._unfed.discard(loader_id)
        self._doubtful.pop(loader_id, None)

    def batch(self, loader_id: int, samples: int | None, evaluating: bool, doubtful: bool = False) -> None:
        """A batch came out of a loader."""
        if evaluating:
            if loader_id in self._fresh and loader_id not in self.train_loaders:
                # Often the first batch of a validation is drawn before the model is switched.
                self.drawn[loader_id].forget(self._fresh.pop(loader_id))
            if doubtful:
                self._doubtful.setdefault(loader_id, []).append(samples)
            return
        self._believe(loader_id)
        self._drawn(loader_id, samples)

    def _believe(self, loader_id: int) -> None:
        """What this loader gave in eval mode was for training; what other loaders gave was not.

        Hugging Face's Trainer draws the next batches before it switches the model back.
        """
        believed = self._doubtful.pop(loader_id, [])
        self._doubtful.clear()
        for samples in believed:
            self._drawn(loader_id, samples)

    def _drawn(self, loader_id: int, samples: int | None) -> None:
        for unfed_id in self._unfed:
            # A whole pass without a backward, and then a batch: that pass was an evaluation.
            self.drawn.pop(unfed_id, None)
            self._fresh.pop(unfed_id, None)
        self._unfed.clear()
        self.drawn.setdefault(loader_id, DrawnBatches()).draw(samples)
        self._fresh[loader_id] = self._fresh.get(loader_id, 0) + 1
        self._last = loader_id
        self.drawn_since_step = True

    def pass_ended(self, loader_id: int, evaluating: bool = False) -> bool:
        """A loader is exhausted. Returns whether this pass has fed a backward so far."""
        if evaluating:
            self._doubtful.pop(loader_id, None)
            return False
        batches = self.drawn.get(loader_id, DrawnBatches())
        batches.ended = True
        if not batches.backwards:
            self._unfed.add(loader_id)
        return batches.backwards > 0

    def backward(self) -> None:
        """backward() ran: the batches drawn for it belong to the step under way."""
        self.backwards += 1
        self._unfed.clear()
        if self._fresh:
            self.settle()
        if self._doubtful and not any(self.drawn[fed].waiting for fed in self._feeding if fed in self.drawn):
            self._believe(next(reversed(self._doubtful)))
        if self._last in self._fresh:
            # A second loader in the same iteration draws about as often as the one that was drawn last;
            # a loader that drew many batches without a backward was evaluating.
            most = self._fresh[self._last] + 1
            for loader_id, drawn in self._fresh.items():
                if drawn > most:
                    self.drawn[loader_id].forget(drawn)
            self._feeding = [loader_id for loader_id, drawn in self._fresh.items() if drawn <= most]
            self._fresh.clear()
            self.train_loaders.update(self._feeding)
        self._use_up(tuple(self._feeding))

    def _use_up(self, feeding: tuple[int, ...]) -> None:
        used = {fed: self.drawn[fed].use_up() if fed in self.drawn else [] for fed in feeding}
        if len(feeding) == 1:
            self._count(used[feeding[0]])
        elif feeding in self._counting:
            self._count(used[self._counting[feeding]])
        elif feeding and self._undecided is None:
            self._undecided = (feeding, used)

    def settle(self) -> None:
        """Decide which of several loaders counts: the first of those drawn in turn, the inner one of nested loops.

        The next draw tells which: the loader of an outer loop is not drawn again.
        """
        if self._undecided is not None:
            feeding, used = self._undecided
            self._undecided = None
            inner = bool(self._fresh) and feeding[0] not in self._fresh
            self._counting[feeding] = feeding[-1] if inner else feeding[0]
            self._count(used[self._counting[feeding]])

    def drawn_in_pause(self, drawn: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
        """The batches and samples of a pause: of several loaders, those of the one that counts."""
        counting = self._counting.get(tuple(self._feeding), -1)
        counted = [drawn[counting]] if counting in drawn else list(drawn.values())
        return sum(batches for batches, _ in counted), sum(samples for _, samples in counted)

    def _count(self, batches: list[int | None]) -> None:
        self._batches += len(batches)
        known = [samples for samples in batches if samples is not None]
        if known:
            self._samples = (self._samples or 0) + sum(known)

    def optimizer_stepped(self, optimizer_id: int) -> bool:
        """An optimizer's step ended (also one that the scaler skipped).

        Returns whether it belongs to a new step rather than to the one just ended.
        """
        new = not self.stepped or optimizer_id in self.stepped or self.drawn_since_step
        if new:
            self.stepped.clear()
        self.stepped.add(optimizer_id)
        self.optimizer_seen = True
        self.drawn_since_step = False
        return new

    def updates_by_hand(self) -> bool:
        """Whether this job never uses an optimizer, so that each backward counts as a step."""
        return not self.optimizer_seen and self.backwards >= BACKWARDS_WITHOUT_OPTIMIZER

    def take_counts(self) -> tuple[int, int | None]:
        """Batches and samples credited since the last call; samples are None when no loader could be counted."""
        batches, samples = self._batches, self._samples
        self._batches, self._samples = 0, None
        return batches, samples


# --------------------------------------------------------------------------- short steps

# Short steps are measured in bursts: a step of 2 ms cannot bear the cost of a full measurement, 0.2 ms of the host's
# time on a GPU. In the pause after each burst, steps are only counted, and their time is divided as that of the
# measured ones. Nothing rare is missed: a long wait and a long step are booked as they are, and saving, evaluating, the
# end of a pass and everything else out of the ordinary end the pause.
MEASURED_STEPS = 16
# Steps are measured one and all until there are this many, and while they take longer than a short one.
MEASURE_ALL_FIRST = 300
# A job limited by launching pays for measuring in full, others on a GPU only where their steps are very short.
SHORT_STEP_S, LAUNCH_LIMITED_STEP_S, VERY_SHORT_STEP_S, LAUNCH_LIMITED = 0.005, 0.010, 0.004, 0.04
# How long a pause lasts, and how long after so many seconds of steps, when the usual one is well known.
PAUSE_S, LATER_S, LATER_PAUSE_S = 0.5, 20.0, 2.0
# A wait for data longer than this is booked even in a pause.
LONG_WAIT_NS = 2_000_000
# So is a step that takes longer than this: it did something that the others do not.
LONG_STEP_NS = 10_000_000
# On a GPU, launching kernels never takes this long, nor several times a whole step.
LONG_STEP_ON_GPU_NS = 20_000_000
LONG_STEP_FACTOR = 4


@dataclass(frozen=True, slots=True)
class BurstPlan:
    """How many calls of optimizers to measure in a burst, and how many only to count after it."""

    measured_calls: int
    counted_calls: int


@dataclass
class Bursts:
    """Measuring in bursts: whether it has paused, and what was only counted since then, in calls of optimizers.

    Totals over measured calls are weighted: each call of a burst has the ``weight`` of itself and its part of the calls
    in the pause before.
    """

    plan: BurstPlan | None = None
    paused: bool = False
    measured_calls: int = 0  # since the last pause
    counted_calls: int = 0
    drawn: dict[int, tuple[int, int]] = field(default_factory=dict)  # batches and samples, by loader
    weight: float = 1.0
    booked_ns: int = 0  # up to here the time of the pause has been booked
    _burst: int = 0
    _all_calls: int = 0
    _weights: float = 0.0

    def pause(self, now_ns: int) -> None:
        """Only count from now on."""
        self.paused = True
        self.counted_calls, self.drawn = 0, {}
        self.booked_ns = now_ns
        self._burst = self.plan.measured_calls if self.plan is not None else 1

    def resume(self) -> None:
        """Measure again."""
        self.paused = False
        self.measured_calls = 0
        self._all_calls += self.counted_calls
        self.weight = 1 + self.counted_calls / self._burst

    def measured(self) -> None:
        """One more call was measured."""
        self.measured_calls += 1
        self._all_calls += 1
        self._weights += self.weight
        if self.measured_calls >= self._burst:
            self.weight = 1.0

    @property
    def scale(self) -> float:
        """What weighted totals are to be multiplied by, so that they also hold the calls of the last pause."""
        return self._all_calls / self._weights if self._weights else 1.0


def plan(steps: int, calls: int, step_s: float, scaler: bool, launch_share: float | None) -> BurstPlan | None:
    """How to measure in bursts; None when every step should be measured.

    Calls are counted instead of steps, so every step must have made the same number of them. ``launch_share``: for how
    much of the time a GPU waits for kernels to be launched; None on a CPU.
    """
    short_s = SHORT_STEP_S
    if launch_share is not None:
        short_s = LAUNCH_LIMITED_STEP_S if launch_share > LAUNCH_LIMITED else VERY_SHORT_STEP_S
    if steps < MEASURE_ALL_FIRST or step_s > short_s or scaler or calls % steps:
        return None
    pause_s = PAUSE_S if steps * step_s < LATER_S else LATER_PAUSE_S
    each = calls // steps
    return BurstPlan(MEASURED_STEPS * each, math.ceil(pause_s / step_s) * each)
