"""Measures the batch rate of loader settings."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from fulltilt.figures import percent
from fulltilt.records import LiveRecord
from fulltilt.tuning.live.limits import DEFAULT, LiveLimits

# A stop this many times the usual one is no part of a step; waiting for a GPU some steps behind is.
PAUSE_TIMES = 20.0
# With fewer groups their standard error is itself a guess.
ENOUGH_GROUPS = 3
UNKNOWN_SPREAD = 0.08
LOOK_EVERY_S = 0.25


class Knobs(NamedTuple):
    """The loader settings that live tuning may change; none of them changes what is trained."""

    num_workers: int
    prefetch_factor: int = 2
    pin_memory: bool = False


class Arrival(NamedTuple):
    """One batch: how long training waited for it, and was busy before; ``from_queue``: by how much the queue shrank."""

    wait_s: float
    busy_s: float
    from_queue: int = 0


class Measurement(NamedTuple):
    """The measured rate of settings. ``spread`` is its relative standard error."""

    knobs: Knobs
    batches_per_s: float
    spread: float
    wait_share: float
    busy_s: float

    def times(self, factor: float) -> Measurement:
        """The same at ``factor`` times the job's pace."""
        return self._replace(batches_per_s=self.batches_per_s * factor, busy_s=self.busy_s / factor)


def summarize(knobs: Knobs, arrivals: Sequence[Arrival], limits: LiveLimits = DEFAULT) -> Measurement | None:
    """The lasting rate over these batches, without pauses and what queued up in them; None when too few are left.

    Batches come in bursts of as many as there are workers: whole bursts count, and the spread is taken between them.
    While the queue drains, training consumes more than the workers make; only what they make counts.
    """
    size = max(knobs.num_workers, 1)
    kept = _without_pauses(arrivals, knobs, limits)
    kept = kept[: len(kept) // size * size]
    if len(kept) < limits.least_batches:
        return None
    seconds = [arrival.wait_s + arrival.busy_s for arrival in kept]
    total_s = sum(seconds)
    if total_s <= 0:
        return None
    groups = [sum(seconds[start : start + size]) for start in range(0, len(kept), size)]
    spread = UNKNOWN_SPREAD
    if len(groups) >= ENOUGH_GROUPS:
        spread = statistics.stdev(groups) / statistics.fmean(groups) / math.sqrt(len(groups))
    used_up = sum(arrival.from_queue for arrival in kept)
    made = len(kept) - (used_up if used_up > 1 else 0)  # one batch more or less in the queue is chance
    rate = max(made, 1) / total_s  # where all came from the queue, it is lower still
    busy_s = sum(arrival.busy_s for arrival in kept) / len(kept)
    return Measurement(knobs, rate, spread, 1 - rate * busy_s, busy_s)


def _without_pauses(arrivals: Sequence[Arrival], knobs: Knobs, limits: LiveLimits) -> list[Arrival]:
    if not arrivals:
        return []
    usual_s = statistics.median(arrival.busy_s for arrival in arrivals)
    longest_s = max(PAUSE_TIMES * usual_s, usual_s + limits.pause_s)
    kept: list[Arrival] = []
    skip = 0
    for arrival in arrivals:
        if arrival.busy_s > longest_s:
            skip = knobs.num_workers * knobs.prefetch_factor + 1
        if skip:
            skip -= 1
        else:
            kept.append(arrival)
    return kept


def is_conclusive(seen: Measurement, best: float | None, limits: LiveLimits = DEFAULT) -> bool:
    """Whether measuring longer would not change the decision: a trial clearly pays or not, a start clearly waits."""
    low, high = (seen.batches_per_s * (1 + times * seen.spread) for times in (-2, 2))
    if best is None:
        return 1 - high * seen.busy_s >= limits.clear_wait_share
    return low > best * (1 + limits.paid_share) or high < best


def with_rates(record: LiveRecord, seen: Measurement) -> LiveRecord:
    """The record with the present rate of the settings in force. The rate of the script's own settings is scaled alike:
    the gain comes from trials only, not from a job that slows down or speeds up by itself."""
    before, wait_share = record.before_batches_per_s, record.before_wait_share
    if record.settings == record.before or before is None:
        before, wait_share = seen.batches_per_s, seen.wait_share
    elif record.batches_per_s:
        before *= seen.batches_per_s / record.batches_per_s
    record = replace(record, before_batches_per_s=before, before_wait_share=wait_share)
    return replace(record, batches_per_s=seen.batches_per_s, wait_share=seen.wait_share)


def pace_changed(before: Measurement, again: Measurement) -> str:
    """Why it is undecided whether a trial between these two pays."""
    factor = again.batches_per_s / before.batches_per_s
    return f"the job itself became {percent(abs(factor - 1))} {'slower' if factor < 1 else 'faster'} meanwhile"


def with_outcome(
    record: LiveRecord,
    outcome: Literal["trying", "kept", "returned", "failed"],
    seen: Measurement | None,
    why: str | None = None,
) -> LiveRecord:
    """The record with the outcome of its last move."""
    rate, wait = (None, None) if seen is None else (seen.batches_per_s, seen.wait_share)
    *earlier, last = record.moves
    ended = replace(last, outcome=outcome, batches_per_s=rate, wait_share=wait, why=why)
    return replace(record, moves=(*earlier, ended))


class MeasurementWindow:
    """Collects batches under one setting until its rate is known."""

    def __init__(self, limits: LiveLimits, clock: Callable[[], float] = time.perf_counter) -> None:
        self._limits = limits
        self._clock = clock
        self.begin(Knobs(0), limits.warm_up_batches)

    def begin(self, knobs: Knobs, skip: int = 0, best: float | None = None) -> None:
        """Start over. The first ``skip`` batches do not count, for at most ``settle_s``.

        ``best``: batches a second of the settings to beat; None for the first measurement.
        """
        self._knobs = knobs
        self._best = best
        self._skip = skip
        self._skipped = 0
        self._skip_until_s = math.inf
        self._arrivals: list[Arrival] = []
        self._look_at_s = 0.0

    def pass_ended(self) -> None:
        """Skip the first batch of the next pass, which waits for the pass to begin."""
        self._skip = max(self._skip, 1)

    def add(self, arrival: Arrival) -> Measurement | None:
        """Add a batch. Returns the measurement once it is good enough."""
        now_s = self._clock()
        if self._skip:
            if not self._skipped:
                self._skip_until_s = now_s + self._limits.settle_s
            self._skipped += 1
            # Each worker gets work first.
            is_over = now_s >= self._skip_until_s and self._skipped >= self._knobs.num_workers
            self._skip = 0 if is_over else self._skip - 1
            return None
        if not self._arrivals:
            self._look_at_s = now_s + self._limits.least_s
            self._end_s = now_s + self._limits.most_s
        self._arrivals.append(arrival)
        if now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + min(LOOK_EVERY_S, self._limits.least_s)
        seen = summarize(self._knobs, self._arrivals, self._limits)
        if seen is None:
            return None
        is_enough = seen.spread <= self._limits.spread or is_conclusive(seen, self._best, self._limits)
        return seen if is_enough or now_s >= self._end_s else None
