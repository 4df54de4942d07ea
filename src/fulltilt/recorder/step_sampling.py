"""Short steps are measured in bursts: between two bursts the recorder rests and only counts.

A step of 2 ms cannot bear what a full measurement costs. Of such steps one in 32 is measured, of 5 ms one in eight;
the time of the others is divided as theirs. Nothing rare is missed: a long wait and a long step are booked as they
are, and saving, evaluating, the end of a pass and everything else out of the ordinary wake the recorder up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fulltilt.records import Buckets

MEASURED_STEPS = 16
# Steps are measured one and all until there are this many, and while they take longer than a short one.
MEASURE_ALL_FIRST = 300
SHORT_STEP_S, RESTED_STEPS = 0.005, 112
VERY_SHORT_STEP_S, RESTED_STEPS_VERY_SHORT = 0.004, 496
# A wait for data longer than this is booked even at rest.
LONG_WAIT_NS = 2_000_000
# So is a step that takes longer than this: it did something that the others do not.
LONG_STEP_NS = 10_000_000

# What the time at rest can have gone into; anything else would have woken the recorder.
ORDINARY = ("data_wait_s", "transfer_s", "compute_s", "sync_s", "host_code_s", "communication_s", "unattributed_s")
FORGET = 0.98


@dataclass(frozen=True, slots=True)
class RestPlan:
    """How many calls of optimizers to measure in a burst, and how many to rest after it."""

    measured_calls: int
    rested_calls: int


@dataclass
class Rest:
    """What was counted since the rest began, in calls of optimizers.

    What is only counted while the recorder is awake is weighted: a measured call ``stands_for`` itself and its part of
    the calls rested before it.
    """

    plan: RestPlan | None = None
    on: bool = False
    awake_calls: int = 0
    calls: int = 0
    drawn: dict[int, tuple[int, int]] = field(default_factory=dict)  # batches and samples, by loader
    stands_for: float = 1.0
    booked_ns: int = 0  # up to here the time at rest has been looked into
    _burst: int = 0
    _all_calls: int = 0
    _stood_for: float = 0.0

    def begin(self, now_ns: int) -> None:
        """Count from nothing."""
        self.on = True
        self.calls, self.drawn = 0, {}
        self.booked_ns = now_ns
        self._burst = self.plan.measured_calls if self.plan is not None else 1

    def draw(self, loader_id: int, samples: int) -> None:
        """A batch was drawn."""
        batches, before = self.drawn.get(loader_id, (0, 0))
        self.drawn[loader_id] = (batches + 1, before + samples)

    def end(self) -> None:
        """Measure again."""
        self.on = False
        self.awake_calls = 0
        self._all_calls += self.calls
        self.stands_for = 1 + self.calls / self._burst

    def measured(self) -> None:
        """One more call was measured."""
        self.awake_calls += 1
        self._all_calls += 1
        self._stood_for += self.stands_for
        if self.awake_calls >= self._burst:
            self.stands_for = 1.0

    @property
    def not_stood_for(self) -> float:
        """All calls over those that the measured ones stand for: what follows the last rest speaks for nobody else."""
        return self._all_calls / self._stood_for if self._stood_for else 1.0


def plan(steps: int, calls: int, step_s: float, scaler: bool) -> RestPlan | None:
    """How to measure in bursts; None when every step should be measured.

    Counting calls stands for counting steps only while every step has made the same number of them.
    """
    if steps < MEASURE_ALL_FIRST or step_s > SHORT_STEP_S or scaler or calls % steps:
        return None
    rested = RESTED_STEPS_VERY_SHORT if step_s < VERY_SHORT_STEP_S else RESTED_STEPS
    return RestPlan(MEASURED_STEPS * (calls // steps), rested * (calls // steps))


@dataclass
class Usual:
    """How measured time has divided lately, with the share of launching in it."""

    seconds: dict[str, float] = field(default_factory=dict)

    def learn(self, buckets: Buckets, launch_s: float) -> None:
        """Take in measured time, without what at rest would be booked as it is."""
        for name in ORDINARY:
            self.seconds[name] = FORGET * self.seconds.get(name, 0.0) + getattr(buckets, name)
        self.seconds["launch_s"] = FORGET * self.seconds.get("launch_s", 0.0) + launch_s

    def divide(self, rest_s: float) -> Mapping[str, float]:
        """``rest_s`` by bucket, and how much of it was launching (``launch_s``, a part of host_code_s)."""
        total = sum(self.seconds.get(name, 0.0) for name in ORDINARY)
        if not total:
            return {"unattributed_s": rest_s}
        return {name: rest_s * seconds / total for name, seconds in self.seconds.items()}
