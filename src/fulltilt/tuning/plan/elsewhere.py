"""How fast the job would be on another GPU: a roofline from data sheets, with its uncertainty. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fulltilt.tuning.plan.gpu_models import GpuModel, Precision

# How far a job strays from the ratio of two data sheets although the right one of the two rates was taken.
MODEL_ERROR = 0.15


@dataclass(frozen=True, slots=True)
class Speed:
    """Samples per second, between ``low`` and ``high``; ``precision`` is what would be computed with there."""

    likely: float
    low: float
    high: float
    precision: Precision


def speed_there(
    samples_per_s: float,
    here: GpuModel,
    there: GpuModel,
    precision: Precision,
    memory_bound: float | None = None,
) -> Speed:
    """The compute ceiling on another GPU when it is ``samples_per_s`` here.

    Arithmetic goes with the peak rates, reading and writing with the bandwidths; a job lies between the two.
    ``memory_bound`` (0 to 1) is where it lay here; without it, the geometric middle.
    """
    rate_here, _ = here.rate(precision)
    rate_there, used = there.rate(precision)
    arithmetic = rate_there / rate_here
    bandwidth = there.bandwidth_gb_per_s / here.bandwidth_gb_per_s
    weight = 0.5 if memory_bound is None else min(max(memory_bound, 0.0), 1.0)
    likely = math.exp((1 - weight) * math.log(arithmetic) + weight * math.log(bandwidth))
    if there is here:
        return Speed(samples_per_s, samples_per_s, samples_per_s, used)
    low, high = min(arithmetic, bandwidth) * (1 - MODEL_ERROR), max(arithmetic, bandwidth) * (1 + MODEL_ERROR)
    return Speed(samples_per_s * likely, samples_per_s * low, samples_per_s * high, used)


def memory_bound_share(tensor_active_pct: float | None, dram_active_pct: float | None) -> float | None:
    """Where a job lies between arithmetic (0) and bandwidth (1), from how busy either unit was; None if not known."""
    if tensor_active_pct is None or dram_active_pct is None or tensor_active_pct + dram_active_pct <= 0:
        return None
    return dram_active_pct / (tensor_active_pct + dram_active_pct)
