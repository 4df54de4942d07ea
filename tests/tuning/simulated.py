"""Jobs that only exist as curves: what a trial of them would measure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from fulltilt.records import Settings, Trial
from fulltilt.tuning.live.controller import Capacity, Settle, at_pace_of, decide, most_workers, pays, pays_clearly
from fulltilt.tuning.live.measurement import Knobs, Measurement
from fulltilt.tuning.search_space import Attempt, Space
from fulltilt.tuning.study import next_step

# Measured on an H200 with 16 CPUs: samples/s over workers (the design's "figures to beat").
COD = {0: 68.0, 4: 265.0, 8: 480.0, 12: 414.0, 16: 394.0, 24: 424.0, 32: 424.0}
CLIP = {0: 170.0, 4: 652.0, 8: 1050.0, 12: 1489.0, 16: 712.0, 24: 712.0, 32: 712.0}
GIB = 1 << 30


@dataclass
class Job:
    """A job whose loader gives ``workers[w]`` samples/s and whose GPU takes at most ``ceiling``.

    From memory that is not pinned it may take fewer: ``unpinned_ceiling``.
    """

    workers: Mapping[int, float]
    ceiling: float
    start: Settings = field(default_factory=lambda: Settings(num_workers=4, prefetch_factor=2, batch_size=64))
    noise: float = 0.0
    seed: int = 0
    wall_s: float = 10.0
    vram_fixed: float = 4.0 * GIB
    vram_each: float = 0.1 * GIB
    vram_total: float = 40.0 * GIB
    batch_gain: float = 0.0
    unpinned_ceiling: float | None = None
    broken: Mapping[Settings, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def in_force(self, asked: Settings) -> Settings:
        names = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "batch_size", "accumulation")
        values = {n: getattr(asked, n) if getattr(asked, n) is not None else getattr(self.start, n) for n in names}
        return Settings(**values, precision=asked.precision or "float32", compile=bool(asked.compile))

    def loader_rate(self, workers: int) -> float:
        known = sorted(self.workers)
        low = max(w for w in known if w <= workers)
        high = min((w for w in known if w >= workers), default=low)
        share = 0.0 if high == low else (workers - low) / (high - low)
        return self.workers[low] + (self.workers[high] - self.workers[low]) * share

    def rate(self, asked: Settings) -> float:
        now = self.in_force(asked)
        assert now.num_workers is not None
        doublings = math.log2((now.batch_size or 64) / (self.start.batch_size or 64))
        compute = self.ceiling * (1 + self.batch_gain * max(0.0, doublings)) * (1.5 if asked.precision == "bf16" else 1)
        return min(self.loader_rate(now.num_workers), compute)

    def measure(self, attempt: Attempt) -> Trial:
        now = self.in_force(attempt.settings)
        vram = self.vram_fixed + self.vram_each * (now.batch_size or 0)
        state = self.broken.get(attempt.settings, "oom" if vram > self.vram_total else "ok")
        if state != "ok":
            return Trial(attempt.settings, state, purpose=attempt.purpose, in_force=now, wall_s=self.wall_s)  # type: ignore[arg-type]
        rate = self.rate(attempt.settings) * math.exp(self._random.gauss(0.0, self.noise))
        compute = self.ceiling if now.pin_memory else self.unpinned_ceiling or self.ceiling
        return Trial(
            attempt.settings,
            "ok",
            samples_per_s=rate,
            samples_per_s_low=rate * (1 - max(2 * self.noise, 0.02)),
            samples_per_s_high=rate * (1 + max(2 * self.noise, 0.02)),
            vram_peak_bytes=int(vram),
            vram_total_bytes=int(self.vram_total),
            ram_peak_bytes=int((2 + 0.5 * (now.num_workers or 0)) * GIB),
            purpose=attempt.purpose,
            in_force=now,
            data_wait_share=max(0.0, 1 - self.loader_rate(now.num_workers or 0) / compute),
            wall_s=self.wall_s,
        )


def study(job: Job, space: Space, budget_s: float = 600.0) -> list[Trial]:
    """The trials of a whole study."""
    trials: list[Trial] = []
    while (attempt := next_step(trials, space, budget_s - sum(t.wall_s or 0 for t in trials))) is not None:
        trials.append(job.measure(attempt))
        assert len(trials) < 60, "a study has to end"
    return trials


def live_tuning(
    rate: Callable[[int], float],
    busy_s: float,
    start: int,
    capacity: Capacity,
    noise: float,
    seed: int,
    pace: Callable[[int], float] = lambda _: 1.0,
) -> tuple[list[Knobs], list[Knobs]]:
    """The settings in force at first and after each move, and the moves; ``pace`` is the job's own, by window."""
    random, windows = Random(seed), itertools.count()

    def see(knobs: Knobs) -> Measurement:
        own = pace(next(windows))
        delivered = own * rate(knobs.num_workers) * math.exp(random.gauss(0, noise))
        return Measurement(knobs, delivered, noise, max(1 - delivered * busy_s / own, 0.0), busy_s / own)

    before, undecided = see(Knobs(start)), 0
    seen: tuple[Measurement, ...] = (before,)
    in_force, moves = [before.knobs], list[Knobs]()
    while not isinstance(move := decide(seen, capacity, (), undecided), Settle):
        assert 1 <= move.num_workers <= most_workers(capacity, move.prefetch_factor)[0]
        trial = see(move)
        again = before if pays_clearly(before, trial) else see(before.knobs)
        paid = pays(before, trial, again)
        known = at_pace_of(again, before, trial, seen)
        again_is_allowed = paid is None and move not in moves
        seen, undecided = (known[:-1], undecided + 1) if again_is_allowed else (known, undecided)
        before = known[-1] if paid else again
        in_force.append(before.knobs)
        moves.append(move)
    return in_force, moves
