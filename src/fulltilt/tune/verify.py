"""The winner against the start, measured anew in turns. Pure functions over trials.

The search picks the best of many noisy trials, which flatters it; so only trials made for the purpose count here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from fulltilt.records import Settings, Trial
from fulltilt.tune.interval import Z_95
from fulltilt.tune.outcome import Attempt
from fulltilt.tune.trials import WORTH, is_valid, knee_of, rate, start_of

LEAST_PAIRS = 2
MOST_PAIRS = 4
# After so many candidates that did not win, the start is as good as any.
MOST_CANDIDATES = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times as fast the candidate is, with its 95 % interval, from so many pairs of trials."""

    candidate: Settings
    ratio: float
    low: float
    high: float
    pairs: int

    @property
    def wins(self) -> bool:
        """Whether the candidate is faster beyond doubt."""
        return self.pairs >= LEAST_PAIRS and self.low > 1.0

    @property
    def decided(self) -> bool:
        """Whether more pairs could hardly change the answer."""
        return self.wins or (self.pairs >= LEAST_PAIRS and self.high < WORTH) or self.pairs >= MOST_PAIRS


def compare(trials: Sequence[Trial], candidate: Settings) -> Comparison | None:
    """The candidate against the start, from the verifying trials; None before the first pair."""
    verifying = [trial for trial in trials if trial.purpose == "verify"]
    start = [trial for trial in verifying if trial.settings == Settings() and is_valid(trial)]
    other = [trial for trial in verifying if trial.settings == candidate and is_valid(trial)]
    pairs = list(zip(start, other, strict=False))
    if not pairs:
        return None
    logs = [math.log(rate(b) / rate(a)) for a, b in pairs]
    within = fmean(_log_variance(a) + _log_variance(b) for a, b in pairs)
    between = variance(logs) if len(logs) > 1 else within
    # Few pairs say little about how far pairs differ: the larger of the two estimates counts.
    half = Z_95 * math.sqrt(max(within, between) / len(logs))
    mean = fmean(logs)
    return Comparison(candidate, math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def candidates(trials: Sequence[Trial]) -> list[Settings]:
    """What is worth verifying, the fastest first."""
    start = start_of(trials)
    if start is None:
        return []
    faster = [
        trial
        for trial in trials
        if trial.purpose == "search" and is_valid(trial) and rate(trial) >= WORTH * rate(start)
    ]
    knee = knee_of(trials)
    largest = knee.settings.batch_size if knee is not None and knee.settings.batch_size else None
    useful = [t for t in faster if largest is None or (t.settings.batch_size or 0) <= largest]
    ordered = sorted(useful, key=rate, reverse=True)
    return [trial.settings for trial in ordered][:MOST_CANDIDATES]


def next_verification(trials: Sequence[Trial]) -> Attempt | None:
    """The next trial that verifies: start and candidate in turns, until it is decided; None when it is."""
    for candidate in candidates(trials):
        comparison = compare(trials, candidate)
        if comparison is not None and comparison.decided:
            if comparison.wins:
                return None
            continue
        verifying = [trial for trial in trials if trial.purpose == "verify"]
        if any(trial.settings == candidate and trial.state not in ("ok", "throttled") for trial in verifying):
            continue  # it worked once and then did not: not to be recommended
        mine = [trial for trial in verifying if trial.settings == candidate and is_valid(trial)]
        starts = [trial for trial in verifying if trial.settings == Settings() and is_valid(trial)]
        if len(verifying) >= 2 * MOST_CANDIDATES * MOST_PAIRS:
            return None
        settings = candidate if len(mine) < len(starts) else Settings()
        return Attempt(settings, "verify", "the winner and the start in turns")
    return None


def winner(trials: Sequence[Trial]) -> Comparison | None:
    """The candidate that was verified to be faster than the start; None when none was."""
    for candidate in candidates(trials):
        comparison = compare(trials, candidate)
        if comparison is not None and comparison.wins:
            return comparison
    return None


def _log_variance(trial: Trial) -> float:
    low, high, mean = trial.samples_per_s_low, trial.samples_per_s_high, trial.samples_per_s
    if not low or not high or not mean or math.isinf(high):
        return 0.05**2
    return ((high - low) / (2 * Z_95) / mean) ** 2
