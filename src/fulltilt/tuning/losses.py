"""Whether a setting breaks training: losses of two trials compared over the same steps. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pvariance

# Fewer common steps than this say nothing.
LEAST_STEPS = 10
# Worse by less than this share is no breakage: another order of the same sums differs by less, a broken one by more.
TOLERATED = 0.05
# And worse by less than so many standard errors is chance.
SURE_ERRORS = 4.0


def compared_steps(start: Sequence[float], other: Sequence[float]) -> range | None:
    """The steps whose losses are compared: the later half of those that both made; None when they are too few."""
    common = min(len(start), len(other))
    return range(common // 2, common) if common >= LEAST_STEPS else None


def mean_loss(losses: Sequence[float], steps: range | None) -> float | None:
    """The mean loss over these steps; None where they were not made."""
    if steps is None or len(losses) < steps.stop or not steps:
        return None
    return fmean(losses[steps.start : steps.stop])


def is_worse(start: Sequence[float], other: Sequence[float]) -> bool:
    """Whether ``other`` trains worse than ``start``: clearly beyond the noise of both."""
    steps = compared_steps(start, other)
    if steps is None:
        return False
    ours, theirs = start[steps.start : steps.stop], other[steps.start : steps.stop]
    error = math.sqrt((pvariance(ours) + pvariance(theirs)) / len(steps))
    excess = fmean(theirs) - fmean(ours)
    return excess > max(SURE_ERRORS * error, TOLERATED * abs(fmean(ours)))
