"""Fakes for tests of Fulltilt and of what is built on it: a clock, NVML with its GPUs, control groups."""

from fulltilt.testing.cgroup import GroupLimits, write_cgroups
from fulltilt.testing.clock import FakeClock
from fulltilt.testing.gpus import FakeGpu, h200, t4
from fulltilt.testing.nvml import FakeNvml
from fulltilt.testing.presets import lost_gpu, no_driver, one_h200, shared_gpu, throttled_gpu, two_t4s

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
