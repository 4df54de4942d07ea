"""The host: CPUs and memory that this process may really use, and what the job uses of them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from fulltilt.probes.cgroup import MemoryGroup, cpu_quota
from fulltilt.probes.counters import Rates, rates_between, read_counters
from fulltilt.probes.tree import ProcessTree
from fulltilt.records import CpuCapacity, HostReading

# Shorter than this, the kernel's counters (10 ms steps) say nothing about a rate.
_MIN_INTERVAL_S = 0.05


def cpu_capacity(root: Path = Path("/")) -> CpuCapacity:
    """CPUs present, and how many this process may use: the least of affinity and cgroup quota, never 0."""
    present = psutil.cpu_count() or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        affinity = len(os.sched_getaffinity(0))
    elif hasattr(psutil.Process, "cpu_affinity"):
        affinity = len(psutil.Process().cpu_affinity() or range(present))
    else:
        affinity = present  # macOS does not bind processes to CPUs
    quota = cpu_quota(root)
    return CpuCapacity(present, affinity, quota, float(affinity) if quota is None else min(float(affinity), quota))


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The tightest cgroup memory limit over this process; None where there is none below the machine's memory."""
    group = MemoryGroup.find(root)
    return group.limit_bytes if group is not None and group.limit_bytes < psutil.virtual_memory().total else None


def memory_headroom_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could still fill: what the machine has available, within the cgroup limit."""
    available = int(psutil.virtual_memory().available)
    group = MemoryGroup.find(root)
    used = None if group is None else group.used_bytes()
    return available if group is None or used is None else max(0, min(available, group.limit_bytes - used))


def shared_memory_bytes(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Total and free bytes of /dev/shm, through which loader workers hand over batches; None where there is none."""
    try:
        usage = shutil.disk_usage(root / "dev/shm")
    except OSError:
        return None, None
    return usage.total, usage.free


class HostProbe:
    """Reads the host and the process tree under ``root_pid`` (default: this process)."""

    def __init__(
        self,
        root_pid: int | None = None,
        *,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root_pid = os.getpid() if root_pid is None else root_pid
        self._root = root
        self._clock = clock
        self._tree = ProcessTree(self.root_pid, clock)
        self._limit_bytes = memory_limit_bytes(root)
        self._group = None if self._limit_bytes is None else MemoryGroup.find(root)
        self._tree_cpu_pct = self._tree.cpu_pct()
        self._counters = read_counters(clock())
        self._rates = Rates()

    def read(self) -> HostReading:
        """One reading; rates and CPU shares are means since the reading before, or since the probe was made."""
        now_s = self._clock()
        if now_s - self._counters.at_s >= _MIN_INTERVAL_S:
            counters = read_counters(now_s)
            self._rates = rates_between(self._counters, counters)
            self._counters, self._tree_cpu_pct = counters, self._tree.cpu_pct()
        memory = psutil.virtual_memory()
        used = None if self._group is None else self._group.used_bytes()
        shm_total_bytes, shm_free_bytes = shared_memory_bytes(self._root)
        return HostReading(
            cpu_pct=self._rates.cpu_pct,
            cpu_per_core_pct=self._rates.cpu_per_core_pct,
            iowait_pct=self._rates.iowait_pct,
            load_1min=_load_1min(),
            mem_total_bytes=int(memory.total),
            mem_used_bytes=int(memory.total - memory.available) if used is None else used,
            mem_limit_bytes=self._limit_bytes,
            tree_pss_bytes=self._tree.pss_bytes(),
            tree_cpu_pct=self._tree_cpu_pct,
            swap_in_bytes_per_s=self._rates.swap_in_bytes_per_s,
            shm_total_bytes=shm_total_bytes,
            shm_free_bytes=shm_free_bytes,
            disk_read_bytes_per_s=self._rates.disk_read_bytes_per_s,
            disk_write_bytes_per_s=self._rates.disk_write_bytes_per_s,
        )


def _load_1min() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None  # Windows has no such figure
