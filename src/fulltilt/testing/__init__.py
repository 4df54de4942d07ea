"""Fakes for tests of Fulltilt and of what is built on it: a clock, NVML with its GPUs, control groups."""

from fulltilt.testing.gpu import (
    FakeGpu,
    FakeNvml,
    h200,
    lost_gpu,
    no_driver,
    one_h200,
    shared_gpu,
    t4,
    throttled_gpu,
    two_t4s,
)
from fulltilt.testing.host import FakeClock, GroupLimits, write_cgroups

__all__ = [
    "FakeClock",
    "FakeGpu",
    "FakeNvml",
    "GroupLimits",
    "h200",
    "lost_gpu",
    "no_driver",
    "one_h200",
    "shared_gpu",
    "t4",
    "throttled_gpu",
    "two_t4s",
    "write_cgroups",
]
