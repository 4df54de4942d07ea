"""Machines for tests: fake NVMLs with the GPUs, and the troubles, that tests want most often."""

from __future__ import annotations

from collections.abc import Callable

import pynvml

from fulltilt.testing.gpus import h200, t4
from fulltilt.testing.nvml import FakeNvml

_GIB = 1024**3

Clock = Callable[[], float]


def two_t4s(clock: Clock | None = None) -> FakeNvml:
    """Kaggle's machine: two T4s, the first at work and the second idle."""
    return FakeNvml([t4(0, util_pct=85, vram_used_bytes=9 * _GIB, power_w=62.0), t4(1)], clock)


def one_h200(clock: Clock | None = None, busy_after_s: float = 5.0) -> FakeNvml:
    """An H200 with GPM: idle at first, then busy with matrix products."""

    def busy(high: float, low: float = 0.0) -> Callable[[float], float]:
        return lambda t_s: high if t_s >= busy_after_s else low

    gpu = h200(busy(96.0), busy(40.0), busy(88.0), busy(35.0), util_pct=busy(100), power_w=busy(650.0, 75.0))
    return FakeNvml([gpu], clock)


def lost_gpu(clock: Clock | None = None, after_s: float = 10.0) -> FakeNvml:
    """Two T4s of which the second falls off the bus."""
    return FakeNvml([t4(0, util_pct=90), t4(1, util_pct=90, lost_after_s=after_s)], clock)


def throttled_gpu(clock: Clock | None = None, after_s: float = 10.0) -> FakeNvml:
    """A T4 that grows too hot and clocks down."""
    thermal = pynvml.nvmlClocksEventReasonSwThermalSlowdown
    gpu = t4(
        util_pct=100,
        temperature_c=lambda t_s: 94 if t_s >= after_s else 70,
        sm_clock_mhz=lambda t_s: 600 if t_s >= after_s else 1590,
        clock_events=lambda t_s: thermal if t_s >= after_s else pynvml.nvmlClocksEventReasonGpuIdle,
    )
    return FakeNvml([gpu], clock)


def shared_gpu(clock: Clock | None = None, our_pid: int = 1000, other_pid: int = 4242) -> FakeNvml:
    """A T4 with a process of ours and one of somebody else's on it."""
    processes = ((our_pid, 5 * _GIB), (other_pid, 6 * _GIB))
    return FakeNvml([t4(util_pct=97, vram_used_bytes=11 * _GIB, processes=processes)], clock)


def no_driver() -> FakeNvml:
    """A machine on which NVML is not installed."""
    return FakeNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
