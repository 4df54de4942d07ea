"""When a metric reaches its target, by its history: a range of epochs, or that it levels off before.

Two curves are fitted to the recent history: a straight line, and an exponential approach to a limit, which is how
metrics usually behave. The limit decides whether the target is reached at all; together they give the range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression, pvariance
from typing import Literal

from fulltilt.figures import seconds

# The latest epochs say most about the next ones; fast early gains would promise too much.
WINDOW = 12
LEAST_HISTORY = 3


@dataclass(frozen=True, slots=True)
class Forecast:
    """``epochs`` and ``hours`` are ranges (soonest, latest); None when unknown or the target is out of reach."""

    state: Literal["reached", "ahead", "saturates", "flat", "unknown"]
    sentence: str
    rate_per_epoch: float | None = None
    limit: float | None = None
    epochs: tuple[float, float] | None = None
    hours: tuple[float, float] | None = None


def forecast(
    history: Sequence[tuple[float, float]],
    target: float,
    epoch_s: float | None = None,
    mode: Literal["max", "min"] = "max",
) -> Forecast:
    """How long until ``target``, by a ``history`` of (epoch, value); with ``mode`` "max" larger values are better."""
    sign = 1.0 if mode == "max" else -1.0
    # The last value of each epoch: a log may have several, and a resumed training repeats some.
    last = {epoch: sign * value for epoch, value in history if math.isfinite(value)}
    points = list(last.items())[-WINDOW:]
    goal = sign * target
    if points and max(value for _, value in points) >= goal:
        return Forecast("reached", f"the target {target:g} is reached", epochs=(0.0, 0.0), hours=(0.0, 0.0))
    if len(points) < LEAST_HISTORY or points[-1][0] <= points[0][0]:
        needed = max(LEAST_HISTORY - len(points), 1)
        more = "1 more epoch is" if needed == 1 else f"{needed} more epochs are"
        return Forecast("unknown", f"{more} needed for a forecast")
    rate, level, error = _line(points)
    limit = _limit(points)
    shown = f"{sign * rate:+.3g} per epoch"
    if rate <= 2.0 * error or rate <= 0.0:
        return Forecast("flat", f"no progress beyond the noise ({shown})", sign * rate)
    if limit is not None and limit[0] <= goal:
        sentence = f"it levels off near {sign * limit[0]:.4g}: the target {target:g} will not be reached ({shown})"
        return Forecast("saturates", sentence, sign * rate, sign * limit[0])
    if limit is not None:  # a line through a curve that flattens would lie above its end
        level = points[-1][1]
        rate, _, error = _line(points[len(points) // 2 :])
    missing = goal - level
    soonest = max(missing / (rate + 2.0 * error), 0.0)
    latest = max(missing / max(rate - 2.0 * error, 1e-12), soonest)
    if limit is not None:
        highest, decay = limit
        latest = max(latest, math.log(max(highest - level, 1e-300) / (highest - goal)) / decay)
    hours = None if epoch_s is None else (soonest * epoch_s / 3600.0, latest * epoch_s / 3600.0)
    sentence = f"{shown}: the target {target:g} in {_epochs(soonest, latest)}"
    if hours is not None:
        sentence += ", " + " to ".join(dict.fromkeys(seconds(3600 * end) for end in hours))
    end = None if limit is None else sign * limit[0]
    return Forecast("ahead", sentence, sign * rate, end, (soonest, latest), hours)


def _epochs(soonest: float, latest: float) -> str:
    """``3 to 7 epochs``, at least one, since a metric is known at the end of an epoch."""
    ends = dict.fromkeys(f"{max(count, 1):.0f}" for count in (soonest, latest))
    return f"{' to '.join(ends)} epoch{'' if list(ends) == ['1'] else 's'}"


def _line(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Least squares: slope, value on the line at the last epoch, standard error of the slope."""
    xs, ys = zip(*points, strict=True)
    slope, intercept = linear_regression(xs, ys)
    residual = sum((y - intercept - slope * x) ** 2 for x, y in points)
    error = math.sqrt(residual / max(len(points) - 2, 1) / (pvariance(xs) * len(points)))
    return slope, intercept + slope * xs[-1], error


def _limit(points: list[tuple[float, float]]) -> tuple[float, float] | None:
    """The limit of ``y = limit − gap · exp(−decay · x)`` and its decay; None without one.

    The slopes of the first and second half give the decay: they shrink geometrically on the way to a limit.
    """
    if len(points) < 4:
        return None
    half = len(points) // 2
    first, second = points[: half + 1], points[-half - 1 :]
    early, _, early_error = _line(first)
    late, _, late_error = _line(second)
    if early <= 0 or late <= 0 or late >= early - 2.0 * math.hypot(early_error, late_error):
        return None
    middle = [sum(x for x, _ in part) / len(part) for part in (first, second)]
    decay = math.log(early / late) / (middle[1] - middle[0])
    gap = late / decay  # the slope at the second half's middle is gap · decay
    centre = sum(y for _, y in second) / len(second)
    return centre + gap, decay
