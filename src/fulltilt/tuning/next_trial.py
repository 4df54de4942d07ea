"""Which trial comes next: a pure function of the trials so far, so that a study can be stopped and resumed.

First the unchanged script, then the loader (workers, then the queue), then what the user has allowed: batch size,
precision, compilation. The winner is then verified (see verification).

Speed rises at most in proportion to the workers, and past a peak it falls, often steeply: CLIP on 16 cores gave 1050,
1489 and 712 samples/s with 8, 12 and 16 workers. A smooth curve through a few points would miss that peak. So the best
number is bracketed, as in live tuning: numbers next to it are tried, one step beyond and then the middle of a gap,
wherever a proportional rise from the number below could still beat it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fulltilt.records import Settings, Trial
from fulltilt.tuning.learning_rate import accumulation_for
from fulltilt.tuning.search_space import (
    DEFAULT_PREFETCH,
    KNEE,
    USABLE_VRAM,
    WAITS,
    Attempt,
    Space,
    best_of,
    fit_line,
    is_loader_only,
    is_valid,
    most_within,
    rate,
    start_of,
    vram_line,
)

MOST_TRIES_WHEN_THROTTLED = 3
MOST_WORKER_TRIALS = 7
MOST_PREFETCH = 8


def next_attempt(trials: Sequence[Trial], space: Space) -> Attempt | None:
    """The next trial of the search; None when nothing promising is left."""
    start = start_of(trials)
    if start is None:
        tries = [trial for trial in trials if trial.purpose == "start"]
        if not tries or (tries[-1].state == "throttled" and len(tries) < MOST_TRIES_WHEN_THROTTLED):
            return Attempt(Settings(), "start", "the script as it is")
        return _smaller_parts(trials, space)
    for phase in (_workers, _queue, _batch, _precision, _compile):
        attempt = phase(trials, space, start)
        if attempt is not None:
            return attempt
    return None


def _attempt(trials: Sequence[Trial], settings: Settings, why: str) -> Attempt | None:
    """A trial of the search, unless these settings were tried before."""
    return None if any(trial.settings == settings for trial in trials) else Attempt(settings, "search", why)


# --------------------------------------------------------------------------- the loader


def _workers(trials: Sequence[Trial], space: Space, start: Trial) -> Attempt | None:
    """The next number of workers: half of the CPUs, then next to the best; None when the loader is fast enough."""
    wait = start.data_wait_share or 0.0
    if space.workers_stay or wait < WAITS or start.in_force.num_workers is None:
        return None
    searched = [trial for trial in trials if trial.purpose != "verify"]
    seen = [t for t in searched if is_loader_only(t.settings) and not t.settings.prefetch_factor]
    valid = [trial for trial in seen if is_valid(trial)]
    best = max(valid, key=rate)
    if len(seen) > MOST_WORKER_TRIALS or (best is not start and (best.data_wait_share or 0.0) < WAITS):
        return None
    most = _most_workers(seen, space)
    # From the start alone the ceiling would be too low: without pinned memory, copies take training time.
    ceiling = max(rate(trial) / max(1 - (trial.data_wait_share or 0.0), 1e-9) for trial in valid) or math.inf
    tried = ((_workers_of(trial), rate(trial) if is_valid(trial) else 0.0) for trial in seen)
    bracket = Bracket.of(tried, most, ceiling, wait)
    workers: int | None = min(space.expected_workers, most)
    is_leap = len(seen) == 1 and workers not in bracket.rates
    if not is_leap:
        workers = bracket.next_count() if bracket.rates else None
    if workers is None:
        return None
    settings = Settings(
        num_workers=workers,
        persistent_workers=True if space.may_persist and not start.in_force.persistent_workers else None,
        pin_memory=True if _on_gpu(start) and not start.in_force.pin_memory else None,
    )
    return _attempt(trials, settings, "half of the CPUs" if is_leap else f"next to {_workers_of(best)} workers")


def _on_gpu(trial: Trial) -> bool:
    return trial.vram_peak_bytes is not None


def _workers_of(trial: Trial) -> int:
    asked = trial.settings.num_workers
    return (trial.in_force.num_workers or 0) if is_valid(trial) or asked is None else asked


def _most_workers(trials: Sequence[Trial], space: Space) -> int:
    """How many workers fit into memory, by the trials so far."""
    too_many = [trial.settings.num_workers for trial in trials if trial.state == "oom" and trial.settings.num_workers]
    ram = fit_line(
        (trial.in_force.num_workers, trial.ram_peak_bytes)
        for trial in trials
        if is_valid(trial) and trial.in_force.num_workers is not None and trial.ram_peak_bytes is not None
    )
    fit = most_within(ram, space.memory_bytes)
    bounds = [space.most_workers, *(workers - 1 for workers in too_many), *([] if fit is None else [fit])]
    return max(1, min(bounds))


def _queue(trials: Sequence[Trial], _space: Space, start: Trial) -> Attempt | None:
    """A longer queue at the best number of workers, while that pays."""
    best = best_of([trial for trial in trials if is_loader_only(trial.settings)]) or start
    longer = 2 * (best.in_force.prefetch_factor or DEFAULT_PREFETCH)
    if not best.in_force.num_workers or (best.data_wait_share or 0.0) < WAITS or longer > MOST_PREFETCH:
        return None
    return _attempt(trials, replace(best.settings, prefetch_factor=longer), "a longer queue")


@dataclass(frozen=True, slots=True)
class Bracket:
    """Brackets the best number of workers. ``rates`` are by number of workers, 0 where a trial failed.

    ``one`` is the expected rate of a single worker, ``ceiling`` what training can consume, ``to_beat`` the rate without
    workers, ``most`` the most workers allowed.
    """

    rates: Mapping[int, float]
    most: int
    one: float | None = None
    ceiling: float = math.inf
    to_beat: float = 0.0

    # From the best to the next number beyond it.
    STEP = 1.5
    # Numbers of workers closer than this have indistinguishable rates.
    GAP = 1.15
    # A number that may not even be this much faster than the best is not worth a trial.
    WORTH = 1.03
    # Rates closer than this are the same; then the fewest workers count as the best.
    SAME = 0.97
    # How much faster than the best fewer workers than were ever tried may be.
    BLIND = 1.25

    @classmethod
    def of(cls, tried: Iterable[tuple[int, float]], most: int, ceiling: float, wait_share: float) -> Bracket:
        """From (workers, rate) pairs; ``wait_share`` is that of the start.

        A start without workers shows what one worker should give: the rate of fetching in the training thread. For each
        number its best rate counts, since a deeper queue may have made it slower.
        """
        rates: dict[int, float] = {}
        for workers, reached in tried:
            rates[workers] = max(reached, rates.get(workers, 0.0))
        without_any = rates.pop(0, 0.0)
        return cls(rates, most, without_any / max(wait_share, 1e-9) if without_any else None, ceiling, without_any)

    def next_count(self) -> int | None:
        """The number of workers to try next; None when none promises more."""
        if self._top == 0:
            return min(min(self.rates) // 2, self.most) or None  # all failed: fewer may fit into memory
        nearby = (count for count in self._next_to_best() if count <= self.most)
        promising = [count for count in nearby if self._could_beat(count)]
        return max(promising, key=self.hope, default=None)

    @property
    def _top(self) -> float:
        return max(self.rates.values(), default=0.0)

    def _next_to_best(self) -> Iterator[int]:
        """Untried numbers: above the best, below it, and a single worker."""
        best = min(count for count, rate in self.rates.items() if rate >= self.SAME * self._top)
        above = min((count for count in self.rates if count > best), default=None)
        below = max((count for count in self.rates if count < best), default=0)
        if above is None:
            if best < self.most:
                yield min(self.most, max(best + 1, round(self.STEP * best)))
        elif above - best > 1 and above > self.GAP * best:
            yield min(max(round(math.sqrt(best * above)), best + 1), above - 1)
        if best - below > 1 and best > self.GAP * below:
            middle = max(round(math.sqrt(best * below)), round(best / self.STEP), below + 1)
            between = range(min(middle, best - 1, self.most), min(best, self.most + 1))
            yield next((count for count in between if self._could_beat(count)), between[-1])
        if self.one is not None and 1 not in self.rates:
            yield 1

    def _could_beat(self, count: int) -> bool:
        return self.hope(count) >= self.WORTH * max(self._top, self.to_beat)

    def hope(self, count: int) -> float:
        """The most that so many workers may give: in proportion to the nearest known number below."""
        known = {tried: rate for tried, rate in self.rates.items() if rate > 0}
        if self.one is not None:
            known.setdefault(1, self.one)
        below = max((tried for tried in known if tried <= count), default=None)
        return min(self.BLIND * self._top if below is None else known[below] * count / below, self.ceiling)


# --------------------------------------------------------------------------- what was allowed by name


def _batch(trials: Sequence[Trial], space: Space, start: Trial) -> Attempt | None:
    """Twice the batch until memory runs out or the rate levels off, then the largest batch that should fit."""
    if "batch" not in space.allow or start.in_force.batch_size is None:
        return None
    base = best_of([trial for trial in trials if is_loader_only(trial.settings)]) or start
    sizes = {
        size: trial
        for trial in trials
        if (size := trial.settings.batch_size) and trial.settings == replace(base.settings, batch_size=size)
    }
    fitting = {start.in_force.batch_size: base, **{size: t for size, t in sizes.items() if is_valid(t)}}
    failed = [size for size, trial in sizes.items() if not is_valid(trial)]
    largest = max(fitting)
    smaller = [size for size in fitting if size < largest]
    if smaller and rate(fitting[largest]) < KNEE * rate(fitting[max(smaller)]):
        return None
    if any(t.in_force.batch_size != t.settings.batch_size for t in sizes.values() if is_valid(t)):
        return None  # the batch size was not applied: the trial's note says why
    wanted = 2 * largest
    usable = None if start.vram_total_bytes is None else USABLE_VRAM * start.vram_total_bytes
    most = most_within(vram_line(fitting.values()), usable)
    if (most is not None and wanted > most) or any(size <= wanted for size in failed):
        if most is None or any(size <= most for size in failed):
            return None
        wanted = most - most % 8 if most >= 8 else most
        if wanted < 1.25 * largest:
            return None
    return _attempt(trials, replace(base.settings, batch_size=wanted), "a larger batch")


def _precision(trials: Sequence[Trial], space: Space, start: Trial) -> Attempt | None:
    if "precision" not in space.allow or start.in_force.precision not in (None, "float32"):
        return None
    best = best_of(trials)
    for precision in ("bf16", "tf32") if _on_gpu(start) else ("bf16",):
        seen = [trial for trial in trials if trial.settings.precision == precision]
        if not seen:
            base = best_of([trial for trial in trials if trial.settings.precision is None]) or start
            return Attempt(replace(base.settings, precision=precision), "search", precision)
        if best in seen:
            return None
    return None


def _compile(trials: Sequence[Trial], space: Space, start: Trial) -> Attempt | None:
    if "compile" not in space.allow or start.in_force.compile or any(t.settings.compile for t in trials):
        return None
    return Attempt(replace((best_of(trials) or start).settings, compile=True), "search", "torch.compile")


def _smaller_parts(trials: Sequence[Trial], space: Space) -> Attempt | None:
    """Where the unchanged script runs out of memory: the same effective batch in equal parts."""
    last = [trial for trial in trials if trial.purpose == "start"][-1]
    batch_size = last.in_force.batch_size
    if last.state != "oom" or not {"batch", "accumulation"} <= space.allow or batch_size is None:
        return None
    size = batch_size
    while (smaller := accumulation_for(batch_size, size // 2)) is not None:
        parts, size = smaller
        settings = Settings(batch_size=size, accumulation=parts)
        if any(is_valid(trial) for trial in trials if trial.settings == settings):
            return None
        if (attempt := _attempt(trials, settings, f"the same batch in {parts} parts")) is not None:
            return attempt
    return None
