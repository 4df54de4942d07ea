"""The Universal Scalability Law over loader workers: X(w) = λw / (1 + σ(w−1) + κw(w−1)), from few and noisy points.

λ is the rate of one worker, σ what workers queue for, κ what they cost each other. Two or three points do not determine
three parameters, so no single curve is fitted: every curve of a grid is weighed by how well it explains the points, and
the answer is their weighted mean with its uncertainty. One point is enough to say where to look next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SIGMAS = (0.0, 0.01, 0.025, 0.055, 0.1, 0.2, 0.35, 0.6, 0.9)
# Where the curve peaks, w* = sqrt((1 − σ) / κ), says more than κ: 1 to 512 workers, or never.
PEAKS = (*(2.0 ** (step / 3) for step in range(28)), math.inf)
# No law fits a real loader better than this, however exactly it was measured.
MISFIT = 0.03
# Away from what was measured a real loader leaves the law: by so much for each factor of two in workers.
DRIFT = 0.12
# A residual of more than so many deviations counts as an outlier: its weight falls with its distance.
OUTLIER = 2.0
# A curve this far from the points (in half squares of deviations) will not matter, however its outliers are weighed.
HOPELESS = 400.0
# Half the width of a 90 % interval, in standard deviations.
NINETY_PERCENT = 1.645


class Measured(NamedTuple):
    """The rate that so many workers gave. ``spread`` is its standard error as a share of the rate."""

    workers: int
    rate: float
    spread: float = 0.0


class Estimate(NamedTuple):
    """A rate with its 90 % interval."""

    rate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of the grid: ``log_rate`` is log λ, ``variance`` its uncertainty, ``weight`` its probability."""

    sigma: float
    kappa: float
    log_rate: float
    variance: float
    weight: float

    def log_at(self, workers: float) -> float:
        """The logarithm of the rate with so many workers."""
        return self.log_rate + _shape(self.sigma, self.kappa, workers)


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """What is known of a loader's rate over its workers."""

    curves: tuple[Curve, ...]
    measured: tuple[int, ...]

    def at(self, workers: int) -> Estimate:
        """The rate that ``workers`` (at least 1) would give."""
        mean = sum(curve.weight * curve.log_at(workers) for curve in self.curves)
        spread = sum(curve.weight * (curve.variance + (curve.log_at(workers) - mean) ** 2) for curve in self.curves)
        drift = DRIFT * min(abs(math.log2(workers / other)) for other in self.measured)
        reach = NINETY_PERCENT * math.hypot(math.sqrt(spread), drift)
        return Estimate(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))

    def best(self, most: int) -> int:
        """The number of workers from 1 to ``most`` with the highest expected rate; the fewest of equals."""
        return max(range(1, most + 1), key=lambda workers: (self.at(workers).rate, -workers))


def fit_scaling(points: Sequence[Measured], expected_peak: float | None = None) -> ScalingLaw:
    """The law behind measured rates. Raises ValueError without a usable point.

    ``expected_peak`` is the number of workers at which a peak would be no surprise, such as the usable CPUs: it decides
    as long as there are few points, and is soon outvoted.
    """
    usable = [point for point in points if point.workers >= 1 and point.rate > 0]
    if not usable:
        raise ValueError("no rate above zero with at least one worker")
    curves = [_weigh(sigma, peak, usable, expected_peak) for sigma in SIGMAS for peak in PEAKS]
    top = max(curve.weight for curve in curves)
    total = sum(math.exp(curve.weight - top) for curve in curves)
    likely = (
        Curve(c.sigma, c.kappa, c.log_rate, c.variance, math.exp(c.weight - top) / total)
        for c in curves
        if c.weight > top - 15  # the others would not change the third digit
    )
    return ScalingLaw(tuple(likely), tuple(sorted({point.workers for point in usable})))


def _weigh(sigma: float, peak: float, points: list[Measured], expected_peak: float | None) -> Curve:
    """A curve through the points, with the logarithm of its likelihood as its weight."""
    kappa = 0.0 if math.isinf(peak) else (1 - sigma) / peak**2
    offsets = [math.log(point.rate) - _shape(sigma, kappa, point.workers) for point in points]
    deviations = [math.hypot(MISFIT, point.spread) for point in points]
    weights = [1 / deviation**2 for deviation in deviations]
    log_rate = _mean(offsets, weights)
    penalty = _penalty(offsets, deviations, log_rate)
    for _ in range(3 if OUTLIER**2 / 2 < penalty < HOPELESS else 0):
        far = [abs(offset - log_rate) / deviation for offset, deviation in zip(offsets, deviations, strict=True)]
        weights = [
            min(1.0, OUTLIER / max(distance, 1e-9)) / deviation**2
            for distance, deviation in zip(far, deviations, strict=True)
        ]
        log_rate = _mean(offsets, weights)
        penalty = _penalty(offsets, deviations, log_rate)
    variance = 1 / sum(weights)
    return Curve(sigma, kappa, log_rate, variance, 0.5 * math.log(variance) - penalty + _prior(peak, expected_peak))


def _prior(peak: float, expected: float | None) -> float:
    if expected is None:
        return 0.0
    factors = math.log(min(peak, 16 * expected) / expected) / math.log(2.5)
    return -0.5 * factors**2


def _shape(sigma: float, kappa: float, workers: float) -> float:
    return math.log(workers) - math.log1p(sigma * (workers - 1) + kappa * workers * (workers - 1))


def _penalty(offsets: list[float], deviations: list[float], log_rate: float) -> float:
    """Huber's loss: half squares near the curve, straight on from there."""
    total = 0.0
    for offset, deviation in zip(offsets, deviations, strict=True):
        distance = abs(offset - log_rate) / deviation
        total += 0.5 * distance**2 if distance <= OUTLIER else OUTLIER * (distance - 0.5 * OUTLIER)
    return total


def _mean(values: list[float], weights: list[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
