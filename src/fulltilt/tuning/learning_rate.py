"""Scales the learning rate to another batch size and shows the arithmetic. Pure functions.

By the square root of the ratio for optimizers that normalise gradients (such as Adam), linearly for SGD. Under deep
supervision, which adds up losses, the rate is lower: 0.6 of it at the present batch, 0.56 at 1.5 times, 0.5 at twice.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

# Optimizers that do not normalise the gradient.
_LINEAR = frozenset({"SGD", "ASGD", "LARS"})
# (ratio of the batch sizes, factor of the learning rate) under deep supervision.
_DEEP_SUPERVISION = ((1.0, 0.6), (1.5, 0.56), (2.0, 0.5))
# From this factor on, warm up.
WARM_UP_FROM = 1.3
WARM_UP = "warm up to it over the first 3 epochs, or 500 steps"


@dataclass(frozen=True, slots=True)
class ScaledRate:
    """A learning rate for another batch size, its arithmetic, and advice to warm up."""

    rate: float
    arithmetic: str
    warm_up: str | None


def scale(
    rate: float, batch: int, new_batch: int, optimizer: str | None = None, deep_supervision: bool = False
) -> ScaledRate:
    """The rate for ``new_batch`` samples a step when ``rate`` was right for ``batch``."""
    if new_batch == batch:
        return ScaledRate(rate, f"{rate:.3g}, as it is", None)
    ratio = new_batch / batch
    fraction = f"{new_batch}/{batch}"
    if optimizer in _LINEAR:
        factor, terms = ratio, f"{rate:.3g} × {fraction}"
    else:
        factor, terms = math.sqrt(ratio), f"{rate:.3g} × sqrt({fraction})"
    if deep_supervision:
        reduced = deep_supervision_factor(ratio) / deep_supervision_factor(1.0)
        factor *= reduced
        terms += f" × {deep_supervision_factor(ratio):.2f}/{deep_supervision_factor(1.0):.1f} (deep supervision)"
    scaled = rate * factor
    advice = f"the rate is {factor:.2g} × as high: {WARM_UP}" if factor >= WARM_UP_FROM else None
    return ScaledRate(scaled, f"{terms} = {scaled:.3g}", advice)


def deep_supervision_factor(ratio: float) -> float:
    """The factor of the rate at this ratio of batch sizes, interpolated between the figures above."""
    if ratio <= 1.0:
        return _DEEP_SUPERVISION[0][1]
    for (low, at_low), (high, at_high) in itertools.pairwise(_DEEP_SUPERVISION):
        if ratio <= high:
            return at_low + (at_high - at_low) * (ratio - low) / (high - low)
    return _DEEP_SUPERVISION[-1][1]


def accumulation_for(batch: int, fits: int) -> tuple[int, int] | None:
    """(parts, samples in each) that make up ``batch`` where only ``fits`` samples fit at once; None if none do."""
    equal = ((parts, batch // parts) for parts in range(1, batch + 1) if batch % parts == 0)
    return next(((parts, size) for parts, size in equal if size <= fits), None)


def uses_deep_supervision(command: tuple[str, ...]) -> bool:
    """Whether a command asks for deep supervision."""
    return any(argument.lstrip("-").replace("_", "-").startswith("deep-supervision") for argument in command)
