"""The learning rate for another batch size, with its arithmetic. Pure functions.

Square root for optimizers that divide by the gradients' size (Adam and its like), linear for SGD. Deep supervision adds
up several losses, so the rate is lower: 0.6 of it at the batch it was found for, 0.56 at one and a half, half at twice.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

# Plain gradient steps: their noise falls with the batch as their length grows with the rate. All others normalise.
_LINEAR = frozenset({"SGD", "ASGD", "LARS"})
# Deep supervision by the ratio of the batch sizes.
_DEEP_SUPERVISION = ((1.0, 0.6), (1.5, 0.56), (2.0, 0.5))
# A rate this many times as high should not be met by fresh weights at once.
WARM_UP_FROM = 1.3
WARM_UP = "warm up to it over the first 3 epochs, or 500 steps"


@dataclass(frozen=True, slots=True)
class Scaled:
    """A learning rate for another batch, how it came about, and whether to warm up to it."""

    rate: float
    arithmetic: str
    warm_up: str | None


def scale(
    rate: float, batch: int, new_batch: int, optimizer: str | None = None, deep_supervision: bool = False
) -> Scaled:
    """The rate for ``new_batch`` samples a step when ``rate`` was right for ``batch``."""
    if new_batch == batch:
        return Scaled(rate, f"{rate:.3g}, as it is", None)
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
    return Scaled(scaled, f"{terms} = {scaled:.3g}", advice)


def deep_supervision_factor(ratio: float) -> float:
    """What deep supervision leaves of the rate at so many times the batch: linear between the figures above."""
    if ratio <= 1.0:
        return _DEEP_SUPERVISION[0][1]
    for (low, at_low), (high, at_high) in itertools.pairwise(_DEEP_SUPERVISION):
        if ratio <= high:
            return at_low + (at_high - at_low) * (ratio - low) / (high - low)
    return _DEEP_SUPERVISION[-1][1]


def accumulation_for(batch: int, fits: int) -> tuple[int, int] | None:
    """The parts and their size that keep the effective batch where only ``fits`` samples fit; None if none do."""
    equal = ((parts, batch // parts) for parts in range(1, batch + 1) if batch % parts == 0)
    return next(((parts, size) for parts, size in equal if size <= fits), None)


def uses_deep_supervision(command: tuple[str, ...]) -> bool:
    """Whether a command asks for deep supervision."""
    return any(argument.lstrip("-").replace("_", "-").startswith("deep-supervision") for argument in command)
