"""The course of a study: search while there is time, keep enough of it to verify, stop when nothing is left."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fulltilt.records import Trial
from fulltilt.tuning.outcome import Attempt
from fulltilt.tuning.search import next_attempt
from fulltilt.tuning.space import Space
from fulltilt.tuning.trials import is_valid, start_of
from fulltilt.tuning.verify import LEAST_PAIRS, next_verification, pairs_to_keep, rivals_of

# How much longer than the start a trial may take: others start more workers, compile, or load larger batches.
LIMIT_FACTOR = 3.0
LIMIT_MORE_S = 20.0
SHORTEST_START_S = 120.0


def next_step(trials: Sequence[Trial], space: Space, left_s: float) -> Attempt | None:
    """The next trial, or None when the study is over: nothing left to try, or no time for it."""
    if start_of(trials) is None:
        return next_attempt(trials, space)  # without it nothing can be said, so it is tried whatever the time
    typical_s = fmean(trial.wall_s or 0.0 for trial in trials if is_valid(trial))
    to_verify_s = 2 * pairs_to_keep(trials) * typical_s
    attempt = next_attempt(trials, space) if left_s >= to_verify_s + typical_s else None
    if attempt is None and left_s >= typical_s:
        made = sum(is_valid(trial) for trial in trials if trial.purpose == "verify")
        rounds_s = (LEAST_PAIRS * (1 + len(rivals_of(trials))) - made) * typical_s
        attempt = next_verification(trials, together=left_s >= rounds_s)
    return attempt


def time_limit_s(trials: Sequence[Trial], left_s: float, asked_s: float | None) -> float:
    """How long the next trial may take."""
    if asked_s is not None:
        return asked_s
    start = start_of(trials)
    if start is None or start.wall_s is None:
        return max(left_s, SHORTEST_START_S)
    # One that hangs is not waited for much beyond the budget.
    return min(LIMIT_FACTOR * start.wall_s + LIMIT_MORE_S, max(left_s, start.wall_s + LIMIT_MORE_S))
