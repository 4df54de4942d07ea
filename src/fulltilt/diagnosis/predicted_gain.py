"""How much faster the job would be without a cause: ranges by Amdahl's law, with the cautious end first."""

from __future__ import annotations

import math

from fulltilt.diagnosis.thresholds import THRESHOLDS

Gain = tuple[float, float]

# No prediction promises more: 1/(1 - share) explodes where measuring noise is larger than what is left.
_MOST = 100.0


def gain(low: float, high: float, cap: float = _MOST) -> Gain:
    """A range of at least 1 and at most ``cap``, rounded."""
    cap = _clip(cap, _MOST)
    high = round(_clip(high, cap), 2)
    return min(round(_clip(low, cap), 2), high), high


def amdahl(share: float) -> float:
    """The factor won by removing ``share`` of the time altogether."""
    return 1 / max(1 - share, 1 / _MOST)


def by_removing(share: float, low_part: float = THRESHOLDS.recovered_low) -> Gain:
    """The gain of removing ``share`` of the time: ``low_part`` of it at the cautious end, all of it at the other."""
    return gain(amdahl(share * low_part), amdahl(share))


def by_speeding_up(share: float, low: float, high: float) -> Gain:
    """The gain when the part that takes ``share`` of the time runs ``low`` to ``high`` times as fast."""
    return gain(amdahl(share * (1 - 1 / low)), amdahl(share * (1 - 1 / high)))


def rarer(share: float, target: float) -> int:
    """The smallest k such that doing it every k-th time brings its share of the time to ``target`` or below."""
    share = min(share, 0.99)
    return max(math.ceil(share / (1 - share) * (1 - target) / target - 1e-9), 2)


def share_left(share: float, every: int) -> float:
    """What is left of a share of the time when the thing is done every ``every``-th time."""
    return share / every / (1 - share + share / every) if share > 0 else 0.0


def expected(predicted: Gain | None) -> float:
    """One figure to order findings by: the middle of the range; 1.0 when nothing is predicted."""
    return math.sqrt(predicted[0] * predicted[1]) if predicted else 1.0


def _clip(factor: float, most: float) -> float:
    return 1.0 if math.isnan(factor) else min(max(factor, 1.0), max(most, 1.0))
