"""The machine's growing counters (CPU time, disk, swap) and the rates that two readings of them make."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Seconds of one core since the machine started. ``iowait_s``: idle, with a process waiting for a disk."""

    busy_s: float
    total_s: float
    iowait_s: float | None


@dataclass(frozen=True, slots=True)
class Counters:
    """Everything that only grows, at one moment."""

    at_s: float
    cores: tuple[CoreTimes, ...]
    swap_in_bytes: int | None
    disk_read_bytes: int | None
    disk_write_bytes: int | None


@dataclass(frozen=True, slots=True)
class Rates:
    """What the counters did between two moments."""

    cpu_pct: float | None = None
    cpu_per_core_pct: tuple[float, ...] | None = None
    iowait_pct: float | None = None
    swap_in_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None


def read_counters(now_s: float) -> Counters:
    """The counters at ``now_s``; None for those that this system does not keep."""
    disk_read_bytes, disk_write_bytes = _disk_bytes()
    cores = tuple(_core_times(times) for times in psutil.cpu_times(percpu=True))
    return Counters(now_s, cores, _swap_in_bytes(), disk_read_bytes, disk_write_bytes)


def rates_between(before: Counters, after: Counters) -> Rates:
    """Means over the time between two readings."""
    span_s = after.at_s - before.at_s
    cores = [_spent(*pair) for pair in zip(before.cores, after.cores, strict=False)]  # a core may come or go
    total_s = sum(core.total_s for core in cores)
    waits = [core.iowait_s for core in cores if core.iowait_s is not None]
    return Rates(
        cpu_pct=_pct(sum(core.busy_s for core in cores), total_s) if cores else None,
        cpu_per_core_pct=tuple(_pct(core.busy_s, core.total_s) for core in cores) or None,
        iowait_pct=_pct(sum(waits), total_s) if waits else None,
        swap_in_bytes_per_s=_rate(before.swap_in_bytes, after.swap_in_bytes, span_s),
        disk_read_bytes_per_s=_rate(before.disk_read_bytes, after.disk_read_bytes, span_s),
        disk_write_bytes_per_s=_rate(before.disk_write_bytes, after.disk_write_bytes, span_s),
    )


def _core_times(times: Any) -> CoreTimes:
    # The time of virtual machines is counted as user time already.
    total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    iowait_s: float | None = getattr(times, "iowait", None)
    return CoreTimes(total_s - times.idle - (iowait_s or 0.0), total_s, iowait_s)


def _spent(before: CoreTimes, after: CoreTimes) -> CoreTimes:
    waits = before.iowait_s is not None and after.iowait_s is not None
    iowait_s = (after.iowait_s or 0.0) - (before.iowait_s or 0.0) if waits else None
    return CoreTimes(after.busy_s - before.busy_s, after.total_s - before.total_s, iowait_s)


def _pct(part_s: float, total_s: float) -> float:
    return min(100.0, max(0.0, 100.0 * part_s / total_s)) if total_s > 0 else 0.0


def _rate(before: int | None, after: int | None, span_s: float) -> float | None:
    if before is None or after is None or span_s <= 0 or after < before:
        return None  # a counter that fell was reset (a disk was taken out)
    return (after - before) / span_s


def _disk_bytes() -> tuple[int | None, int | None]:
    try:
        counters = psutil.disk_io_counters(nowrap=False)
    except (OSError, RuntimeError, psutil.Error):
        counters = None  # a container may hide the disks
    return (None, None) if counters is None else (int(counters.read_bytes), int(counters.write_bytes))


def _swap_in_bytes() -> int | None:
    # psutil reads this too, but says 0 on Windows and, where the kernel does not tell, warns through global state.
    try:
        with Path("/proc/vmstat").open("rb") as file:
            for line in file:
                if line.startswith(b"pswpin "):
                    return int(line.split()[1]) * mmap.PAGESIZE
    except OSError:
        pass
    return None
