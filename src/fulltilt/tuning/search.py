"""Which trial comes next. A pure function of the trials so far, so that a study can be stopped and taken up anywhere.

The start, then the loader (workers, then the queue), then what the user has allowed: the batch size, precision,
compilation. At last the winner is verified against the start; that is `verify.py`.

More workers help in proportion at best, and past a peak they harm, often at once: CLIP on 16 cores gave 1050, 1489 and
712 samples/s with 8, 12 and 16 workers. A smooth law through some of these points does not see the peak between them.
So the best number of workers is bracketed (live tuning does it too): the numbers beside it are tried, a step beyond and
then the middle of a gap, wherever a proportional rise from the number below could still beat it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fulltilt.records import Settings, Trial
from fulltilt.tuning.learning_rate import accumulation_for
from fulltilt.tuning.memory_line import USABLE_VRAM, ram_line, vram_line
from fulltilt.tuning.scaling import Measured, fit_scaling
from fulltilt.tuning.space import (
    KNEE,
    OF_ONE_BLOCK,
    WAITS,
    Attempt,
    Space,
    best_of,
    changed,
    is_loader_only,
    is_valid,
    on_gpu,
    rate,
    start_of,
    tried,
    with_loader,
)
from fulltilt.tuning.trial.throughput import Z_95

MOST_TRIES_WHEN_THROTTLED = 3
MOST_WORKER_TRIALS = 7
# From the best to the next number beyond it.
STEP = 1.5
# Numbers of workers closer than this are not told apart by their rates.
GAP = 1.15
# A number that can at most be this much faster than the best is not worth a trial.
WORTH = 1.03
# Rates closer than this are the same; then the fewest workers count as the best, and what is below them is looked at.
SAME = 0.97
# What fewer workers than were ever tried may give, where nothing is known below them.
BLIND = 1.25

Phase = Callable[[Sequence[Trial], Space], Attempt | None]


def next_attempt(trials: Sequence[Trial], space: Space) -> Attempt | None:
    """The next trial of the search; None when there is nothing left that promises anything."""
    start = start_of(trials)
    if start is None:
        tries = [trial for trial in trials if trial.purpose == "start"]
        retry = not tries or (tries[-1].state == "throttled" and len(tries) < MOST_TRIES_WHEN_THROTTLED)
        if retry:
            return Attempt(Settings(), "start", "the script as it is")
        return _smaller_parts(trials, space)
    phases: tuple[Phase, ...] = (next_workers, _queue, _batch, _precision, _compile)
    for phase in phases:
        attempt = phase(trials, space)
        if attempt is not None:
            return attempt
    return None


# --------------------------------------------------------------------------- the loader


def _queue(trials: Sequence[Trial], _space: Space) -> Attempt | None:
    """A longer queue at the best number of workers, as long as it pays."""
    best = best_of([trial for trial in trials if is_loader_only(trial.settings)])
    assert best is not None
    if not best.in_force.num_workers or (best.data_wait_share or 0.0) < WAITS:
        return None
    longer = 2 * (best.in_force.prefetch_factor or 2)
    settings = changed(best.settings, prefetch_factor=longer)
    return None if longer > 8 or tried(trials, settings) else Attempt(settings, "search", "a longer queue")


def next_workers(trials: Sequence[Trial], space: Space) -> Attempt | None:
    """The next number of workers: half of the CPUs, then beside the best; None when the loader is fast enough."""
    start = start_of(trials)
    assert start is not None
    if space.workers_stay or (start.data_wait_share or 0.0) < WAITS or start.in_force.num_workers is None:
        return None
    searched = [trial for trial in trials if trial.purpose != "verify"]
    seen = [t for t in searched if is_loader_only(t.settings) and not t.settings.prefetch_factor]
    best = max((trial for trial in seen if is_valid(trial)), key=rate)
    if len(seen) > MOST_WORKER_TRIALS or (best is not start and (best.data_wait_share or 0.0) < WAITS):
        return None
    rates = {count: rate(trial) if is_valid(trial) else 0.0 for trial in seen if (count := _workers_of(trial))}
    most = _most_workers(seen, space)
    half = min(space.expected_workers, most)
    if len(seen) == 1 and half not in rates:
        workers: int | None = half
    else:
        without_any = 0.0 if start.in_force.num_workers else rate(start)
        workers = Bracket(rates, most, _rate_of_one(start), _ceiling(seen), without_any).next_count() if rates else None
    if workers is None:
        return None
    settings = with_loader(start, workers, on_gpu(start), space.may_persist)
    return None if tried(trials, settings) else Attempt(settings, "search", _why(workers, seen, space))


def _workers_of(trial: Trial) -> int:
    asked = trial.settings.num_workers
    return (trial.in_force.num_workers or 0) if is_valid(trial) or asked is None else asked


def _rate_of_one(start: Trial) -> float | None:
    """What one worker should give, from a start without any: the training thread's own fetching."""
    wait = start.data_wait_share
    return rate(start) / wait if start.in_force.num_workers == 0 and wait else None


def _ceiling(seen: Sequence[Trial]) -> float:
    """Samples a second that training could take if it never waited, by the trial in which a step took it least.

    The start alone would tell too little: without pinned memory its copies take the training's time, not the loader's.
    """
    takes = [rate(trial) / max(1 - (trial.data_wait_share or 0.0), 1e-9) for trial in seen if is_valid(trial)]
    return max(takes) or math.inf


def _why(workers: int, seen: Sequence[Trial], space: Space) -> str:
    """For the status line: what the scaling law through the trials so far expects."""
    points = [Measured(_workers_of(t), rate(t), _spread(t)) for t in seen if is_valid(t) and _workers_of(t)]
    if not points:
        return "half of the CPUs"
    expected = fit_scaling(points, expected_peak=space.usable_cpus).at(workers)
    return f"the scaling law expects {expected.low:.0f} to {expected.high:.0f} samples/s"


def _most_workers(trials: Sequence[Trial], space: Space) -> int:
    """Workers that fit into memory, by the trials so far."""
    too_many = [trial.settings.num_workers for trial in trials if trial.state == "oom" and trial.settings.num_workers]
    bounds = [space.most_workers, *(workers - 1 for workers in too_many)]
    line = ram_line(trials)
    if line is not None and space.memory_bytes is not None:
        fit = line.most_within(space.memory_bytes)
        bounds += [] if fit is None else [fit]
    return max(1, min(bounds))


def _spread(trial: Trial) -> float:
    low, high = trial.samples_per_s_low, trial.samples_per_s_high
    if low is None or high is None or math.isinf(high) or not trial.samples_per_s:
        return OF_ONE_BLOCK
    return (high - low) / (2 * Z_95) / trial.samples_per_s


@dataclass(frozen=True, slots=True)
class Bracket:
    """What is known of a loader: ``rates`` by workers, 0 where a trial failed, and how many there may be at ``most``.

    ``one`` is what a single worker should give, where that is known otherwise; ``ceiling`` what training can take;
    ``to_beat`` what it has without workers.
    """

    rates: Mapping[int, float]
    most: int
    one: float | None = None
    ceiling: float = math.inf
    to_beat: float = 0.0

    def next_count(self) -> int | None:
        """The number of workers that should be tried next; None when none promises more."""
        if self._top == 0:
            return min(min(self.rates) // 2, self.most) or None  # all failed: with fewer there may be room
        beside = (count for count in self._beside_the_best() if count <= self.most)
        promising = [count for count in beside if self._could_beat(count)]
        return max(promising, key=self._hope, default=None)

    @property
    def best(self) -> int:
        """The fewest workers whose rate is the best, or cannot be told from it."""
        return min(count for count, rate in self.rates.items() if rate >= SAME * self._top)

    @property
    def _top(self) -> float:
        return max(self.rates.values())

    def _beside_the_best(self) -> Iterator[int]:
        """Numbers that were not tried yet: above the best, below it, and a single worker."""
        best = self.best
        above = min((count for count in self.rates if count > best), default=None)
        below = max((count for count in self.rates if count < best), default=0)
        if above is None:
            if best < self.most:
                yield min(self.most, max(best + 1, round(STEP * best)))
        elif above - best > 1 and above > GAP * best:
            yield min(max(round(math.sqrt(best * above)), best + 1), above - 1)
        if best - below > 1 and best > GAP * below:
            middle = max(round(math.sqrt(best * below)), round(best / STEP), below + 1)
            between = range(min(middle, best - 1, self.most), min(best, self.most + 1))
            yield next((count for count in between if self._could_beat(count)), between[-1])
        if self.one is not None and 1 not in self.rates:
            yield 1

    def _could_beat(self, count: int) -> bool:
        return self._hope(count) >= WORTH * max(self._top, self.to_beat)

    def _hope(self, count: int) -> float:
        """The most that so many workers may give: a rise in proportion from the nearest number below that is known."""
        known = {tried: rate for tried, rate in self.rates.items() if rate > 0}
        if self.one is not None:
            known.setdefault(1, self.one)
        below = max((tried for tried in known if tried <= count), default=None)
        return min(BLIND * self._top if below is None else known[below] * count / below, self.ceiling)


# --------------------------------------------------------------------------- what was allowed by name


def _batch(trials: Sequence[Trial], space: Space) -> Attempt | None:
    """Twice the batch until memory ends or the knee is reached, then the largest that the memory line promises."""
    start = start_of(trials)
    if "batch" not in space.allow or start is None or start.in_force.batch_size is None:
        return None
    base = best_of([trial for trial in trials if is_loader_only(trial.settings)]) or start
    sizes = {
        trial.settings.batch_size: trial
        for trial in trials
        if trial.settings.batch_size and trial.settings == changed(base.settings, batch_size=trial.settings.batch_size)
    }
    fitting = {start.in_force.batch_size: base, **{size: t for size, t in sizes.items() if size and is_valid(t)}}
    failed = [size for size, trial in sizes.items() if size and not is_valid(trial)]
    largest = max(fitting)
    smaller = [size for size in fitting if size < largest]
    if smaller and rate(fitting[largest]) < KNEE * rate(fitting[max(smaller)]):
        return None
    if any(t.in_force.batch_size != t.settings.batch_size for t in sizes.values() if is_valid(t)):
        return None  # the batch size did not take effect: the trial's note says why
    wanted = 2 * largest
    line = vram_line(fitting.values())
    room = None if line is None or start.vram_total_bytes is None else USABLE_VRAM * start.vram_total_bytes
    most = line.most_within(room) if line is not None and room is not None else None
    if (most is not None and wanted > most) or any(size <= wanted for size in failed):
        if most is None or any(size <= most for size in failed):
            return None
        wanted = most - most % 8 if most >= 8 else most
        if wanted < 1.25 * largest:
            return None
    settings = changed(base.settings, batch_size=wanted)
    return None if tried(trials, settings) else Attempt(settings, "search", "a larger batch")


def _precision(trials: Sequence[Trial], space: Space) -> Attempt | None:
    start, best = start_of(trials), best_of(trials)
    assert start is not None
    assert best is not None
    if "precision" not in space.allow or start.in_force.precision not in (None, "float32"):
        return None
    for precision in ("bf16", "tf32") if on_gpu(start) else ("bf16",):
        seen = [trial for trial in trials if trial.settings.precision == precision]
        if not seen:
            base = best_of([trial for trial in trials if trial.settings.precision is None])
            assert base is not None
            return Attempt(changed(base.settings, precision=precision), "search", precision)
        if any(is_valid(trial) and trial is best for trial in seen):
            return None
    return None


def _compile(trials: Sequence[Trial], space: Space) -> Attempt | None:
    start = start_of(trials)
    assert start is not None
    if "compile" not in space.allow or start.in_force.compile or any(t.settings.compile for t in trials):
        return None
    best = best_of(trials)
    assert best is not None
    return Attempt(changed(best.settings, compile=True), "search", "torch.compile")


def _smaller_parts(trials: Sequence[Trial], space: Space) -> Attempt | None:
    """When the script as it is runs out of memory: the same effective batch in two, four, … equal parts."""
    tries = [trial for trial in trials if trial.purpose == "start"]
    batch_size = tries[-1].in_force.batch_size
    if tries[-1].state != "oom" or not {"batch", "accumulation"} <= space.allow or batch_size is None:
        return None
    size = batch_size
    while (smaller := accumulation_for(batch_size, size // 2)) is not None:
        parts, size = smaller
        settings = Settings(batch_size=size, accumulation=parts)
        seen = tried(trials, settings)
        if not seen:
            return Attempt(settings, "search", f"the same batch in {parts} parts")
        if any(is_valid(trial) for trial in seen):
            return None
    return None
