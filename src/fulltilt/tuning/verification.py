"""Whether a candidate is certainly faster than the start: both run in turns until that is known. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, variance

from fulltilt.records import Settings, Trial
from fulltilt.tuning.search_space import WORTH, Attempt, is_valid, knee_of, rate, start_of
from fulltilt.tuning.trial.throughput import Z_95

LEAST_PAIRS = 2
# Enough after a single pair: a machine's own pace does not change by this much within minutes.
CLEAR_OF_ONE_PAIR = 1.5
# A candidate that was this much faster in the search needs only one pair.
FAR_AHEAD = 2.0
MOST_PAIRS = 4
# Two pairs that differ by more say little: one of their trials was an outlier.
LIKE_PAIRS = 1.5
# A limit, since trials that were throttled or failed make no pair.
MOST_TRIALS = 4 * MOST_PAIRS
# The relative error of a trial with a single block, whose interval is unbounded.
OF_ONE_BLOCK = 0.5
# A relative error above this says nothing more.
WIDEST = 10.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The speedup of the candidate over the start, with its 95 % interval and the number of pairs behind it."""

    candidate: Settings
    ratio: float
    low: float
    high: float
    pairs: int

    @property
    def wins(self) -> bool:
        """Whether the candidate is faster beyond doubt."""
        if self.pairs < LEAST_PAIRS:
            return self.low > CLEAR_OF_ONE_PAIR
        return self.low > 1.0 and (self.pairs > LEAST_PAIRS or self.high <= LIKE_PAIRS * self.low)

    @property
    def decided(self) -> bool:
        """Whether more pairs could hardly change the answer."""
        is_conclusive = self.wins or self.high < WORTH
        return (self.pairs >= LEAST_PAIRS and is_conclusive) or self.pairs >= MOST_PAIRS


def compare(trials: Sequence[Trial], candidate: Settings) -> Comparison | None:
    """The candidate against the start; None before the first pair.

    The best of many noisy trials looks better than it is, so only trials made to verify count, and of those only the
    ones right after a trial of the start, since a machine's pace changes from minute to minute.
    """
    turns = pairwise(trial for trial in trials if trial.purpose == "verify")
    pairs = [(a, b) for a, b in turns if _is_start(a) and b.settings == candidate and is_valid(b)]
    if not pairs:
        return None
    logs = [math.log(rate(b) / rate(a)) for a, b in pairs]
    within = fmean(_log_variance(a) + _log_variance(b) for a, b in pairs)
    between = variance(logs) if len(logs) > 1 else within
    # A few pairs are a poor estimate of their spread: the larger of the two estimates counts.
    half = Z_95 * math.sqrt(max(within, between) / len(logs))
    mean = fmean(logs)
    return Comparison(candidate, math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def _is_start(trial: Trial) -> bool:
    return trial.settings == Settings() and is_valid(trial)


def _log_variance(trial: Trial) -> float:
    low, high, mean = trial.samples_per_s_low, trial.samples_per_s_high, trial.samples_per_s
    if low is None or high is None or not mean or math.isinf(high):
        return OF_ONE_BLOCK**2
    return min(abs(high - low) / (2 * Z_95) / mean, WIDEST) ** 2


def candidate_of(trials: Sequence[Trial]) -> Settings | None:
    """The settings to verify: the fastest of the search that have not failed since; None where there are none."""
    start, knee = start_of(trials), knee_of(trials)
    if start is None:
        return None
    least = WORTH * rate(start)
    faster = [trial for trial in trials if trial.purpose == "search" and is_valid(trial) and rate(trial) >= least]
    largest = math.inf if knee is None else knee.settings.batch_size or math.inf
    useful = [t for t in faster if (t.settings.batch_size or 0) <= largest]
    broken = {t.settings for t in trials if t.purpose == "verify" and t.state not in ("ok", "throttled")}
    sound = (t for t in useful if t.settings not in broken and not _only_queues_longer(t, useful))
    best = max(sound, key=rate, default=None)
    return None if best is None else best.settings


def _only_queues_longer(trial: Trial, others: Sequence[Trial]) -> bool:
    """Whether the longer queue of a trial gained nothing over the same settings without it."""
    shorter = replace(trial.settings, prefetch_factor=None)
    return any(t is not trial and t.settings == shorter and rate(trial) < WORTH * rate(t) for t in others)


def pairs_to_keep(trials: Sequence[Trial]) -> int:
    """How many pairs of trials to keep time for: one where the best is far ahead."""
    start, found = start_of(trials), candidate_of(trials)
    if start is None or found is None:
        return 0
    best = max(rate(trial) for trial in trials if trial.settings == found and is_valid(trial))
    return 1 if best >= FAR_AHEAD * rate(start) else LEAST_PAIRS


def next_verification(trials: Sequence[Trial]) -> Attempt | None:
    """The next trial that verifies: start and candidate in turns; None when it is decided."""
    verifying = [trial for trial in trials if trial.purpose == "verify"]
    candidate, comparison = candidate_of(trials), verified(trials)
    if candidate is None or (comparison is not None and comparison.decided) or len(verifying) >= MOST_TRIALS:
        return None
    follows_start = bool(verifying) and _is_start(verifying[-1])
    return Attempt(candidate if follows_start else Settings(), "verify", "the winner and the start in turns")


def verified(trials: Sequence[Trial]) -> Comparison | None:
    """The comparison of the candidate with the start; None without a candidate or a pair."""
    candidate = candidate_of(trials)
    return None if candidate is None else compare(trials, candidate)


def winner(trials: Sequence[Trial]) -> Comparison | None:
    """The candidate, if it was verified to be faster than the start."""
    comparison = verified(trials)
    return comparison if comparison is not None and comparison.wins else None
