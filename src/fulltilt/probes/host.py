"""CPUs, memory and disk of the host, and what the watched process tree uses of them."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from fulltilt.probes.cgroup import MemoryGroup, cpu_quota, kernel_count
from fulltilt.probes.rate_limit import RateLimit
from fulltilt.records import CpuCapacity, HostReading

# --------------------------------------------------------------------------- tree

# Walking /proc takes milliseconds on a large machine, and reading PSS 5 to 10 ms for each GiB of each process. Together
# they stay under 0.3 % of a core; the first reading of all processes may take a quarter of a second.
_WALK_SHARE = 0.001
_WALK_CREDIT_S = 0.02
_PSS_SHARE = 0.0015
_PSS_FIRST_CREDIT_S = 0.25
_PSS_AT_ONCE_S = 0.05


class ProcessTree:
    """The process ``root_pid`` and everything it started."""

    def __init__(
        self, root_pid: int, clock: Callable[[], float] = time.monotonic, walk_share: float = _WALK_SHARE
    ) -> None:
        """``walk_share`` of a core may be spent on finding the processes."""
        self.root_pid = root_pid
        self._clock = clock
        self._walks = RateLimit(walk_share, _WALK_CREDIT_S)
        self._first_pss = RateLimit(_PSS_SHARE, _PSS_FIRST_CREDIT_S)
        self._next_pss = RateLimit(_PSS_SHARE)
        self._members: dict[int, psutil.Process] = {}
        self._cpu_s: dict[int, tuple[float, float]] = {}  # pid: (moment, CPU time up to then)
        self._pss: dict[int, tuple[float, int]] = {}  # pid: (moment, bytes)

    def pids(self) -> frozenset[int]:
        """The process ids of the tree, at most a few seconds old; empty when the root has ended."""
        return frozenset(self._walk())

    def cpu_pct(self) -> float | None:
        """CPU use of the tree since the call before; 100 is one core. None in the first call."""
        now_s = self._clock()
        before, after, busy = self._cpu_s, {}, 0.0
        for pid, process in self._walk().items():
            try:
                times = process.cpu_times()
                cpu_s = times.user + times.system
                # A process that began since the call before counts from its own start.
                since_s, base_s = before.get(pid) or (now_s - (time.time() - process.create_time()), 0.0)
            except psutil.Error:
                continue
            after[pid] = (now_s, cpu_s)
            if now_s > since_s:
                busy += max(0.0, cpu_s - base_s) / (now_s - since_s)
        self._cpu_s = after
        return 100.0 * busy if before and after else None

    def pss_bytes(self) -> int | None:
        """Memory of the tree with shared pages counted once, so that forked workers are not counted twice.

        Each process is measured in turn as the rate limit allows; None until each has been measured once.
        """
        members = self._walk()
        self._pss = {pid: known for pid, known in self._pss.items() if pid in members}
        deadline_s = time.perf_counter() + _PSS_AT_ONCE_S
        for pid in sorted(members, key=lambda pid: self._pss[pid][0] if pid in self._pss else float("-inf")):
            limit = self._next_pss if pid in self._pss else self._first_pss
            if not limit.due() or time.perf_counter() >= deadline_s:
                break
            with limit.spend():
                self._pss[pid] = (time.perf_counter(), proportional_bytes(pid))
        return sum(size for _, size in self._pss.values()) if members and len(self._pss) == len(members) else None

    def _walk(self) -> dict[int, psutil.Process]:
        if self._walks.due():
            # Charged by CPU time: on a full machine walks take longer, but new workers must still be seen in time.
            began_s = time.thread_time()
            try:
                root = psutil.Process(self.root_pid)
                found = [root, *root.children(recursive=True)]
            except psutil.Error:
                found = []
            self._members = {process.pid: process for process in found}
            self._walks.charge(time.thread_time() - began_s)
        return self._members


def proportional_bytes(pid: int) -> int:
    """Memory of a process, with shared pages counted in part (PSS); RSS where the system has no PSS."""
    try:
        return page_totals(pid)["Pss"]
    except (OSError, KeyError):
        pass  # not Linux, an old kernel, or the process has gone
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, OSError):
        return 0  # it has gone, and holds nothing


def page_totals(pid: int) -> dict[str, int]:
    """The kernel's totals over the pages of a process (Pss, Private_Dirty, …), in bytes. Raises OSError."""
    with open(f"/proc/{pid}/smaps_rollup", "rb") as file:  # noqa: PTH123 - the fast way, every second
        lines = (line.split() for line in file)
        return {parts[0][:-1].decode(): int(parts[1]) * 1024 for parts in lines if parts[-1] == b"kB"}


# --------------------------------------------------------------------------- counters


class CoreTimes(NamedTuple):
    """Seconds of one core since the machine started. ``iowait_s``: idle, with a process waiting for a disk."""

    busy_s: float
    total_s: float
    iowait_s: float | None


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters at one moment; None where the system does not have one."""

    at_s: float
    cores: tuple[CoreTimes, ...]
    swap_in_bytes: int | None
    disk_read_bytes: int | None
    disk_write_bytes: int | None


def read_counters(now_s: float) -> Counters:
    """The counters at ``now_s``."""
    disk_read_bytes, disk_write_bytes = _disk_bytes()
    cores = tuple(_core_times(times) for times in psutil.cpu_times(percpu=True))
    return Counters(now_s, cores, _swap_in_bytes(), disk_read_bytes, disk_write_bytes)


def rates_between(before: Counters, after: Counters) -> HostReading:
    """A reading with means over the time between two readings of the counters."""
    span_s = after.at_s - before.at_s
    pairs = list(zip(before.cores, after.cores, strict=False))  # a core may come or go
    busy_s = [new.busy_s - old.busy_s for old, new in pairs]
    total_s = [new.total_s - old.total_s for old, new in pairs]
    waits_s = [new.iowait_s - old.iowait_s for old, new in pairs if None not in (old.iowait_s, new.iowait_s)]  # type: ignore[operator]
    return HostReading(
        cpu_pct=_pct(sum(busy_s), sum(total_s)) if pairs else None,
        cpu_per_core_pct=tuple(map(_pct, busy_s, total_s)) or None,
        iowait_pct=_pct(sum(waits_s), sum(total_s)) if waits_s else None,
        swap_in_bytes_per_s=_rate(before.swap_in_bytes, after.swap_in_bytes, span_s),
        disk_read_bytes_per_s=_rate(before.disk_read_bytes, after.disk_read_bytes, span_s),
        disk_write_bytes_per_s=_rate(before.disk_write_bytes, after.disk_write_bytes, span_s),
    )


def _core_times(times: Any) -> CoreTimes:
    # The time of virtual machines is counted as user time already.
    total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    iowait_s: float | None = getattr(times, "iowait", None)
    return CoreTimes(total_s - times.idle - (iowait_s or 0.0), total_s, iowait_s)


def _pct(part_s: float, total_s: float) -> float:
    return min(100.0, max(0.0, 100.0 * part_s / total_s)) if total_s > 0 else 0.0


def _rate(before: int | None, after: int | None, span_s: float) -> float | None:
    if before is None or after is None or span_s <= 0 or after < before:
        return None  # a counter that fell was reset (a disk was removed)
    return (after - before) / span_s


def _disk_bytes() -> tuple[int | None, int | None]:
    try:
        counters = psutil.disk_io_counters(nowrap=False)
    except (OSError, RuntimeError, psutil.Error):
        counters = None  # a container may hide the disks
    return (None, None) if counters is None else (int(counters.read_bytes), int(counters.write_bytes))


def _swap_in_bytes() -> int | None:
    # psutil reads this, too, but gives 0 on Windows and warns globally where the kernel does not report it.
    pages = kernel_count(Path("/proc/vmstat"), "pswpin")
    return None if pages is None else pages * mmap.PAGESIZE


# --------------------------------------------------------------------------- host

# Over less time the kernel's counters (10 ms steps) give no rate.
_MIN_INTERVAL_S = 0.05


def cpu_capacity(root: Path = Path("/")) -> CpuCapacity:
    """CPUs present, and how many this process may use, by affinity and cgroup quota."""
    present = psutil.cpu_count() or os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    usable = float(affinity) if quota is None else min(float(affinity), quota)
    return CpuCapacity(present, affinity, quota, usable, _allotted_by_slurm())


def _allotted_by_slurm() -> int | None:
    """The job's CPUs on this node for each of its tasks; None outside of Slurm."""
    on_node = os.environ.get("SLURM_CPUS_ON_NODE", "")
    tasks = os.environ.get("SLURM_TASKS_PER_NODE", "1").partition("(")[0].partition(",")[0]
    return int(on_node) // max(int(tasks), 1) if on_node.isdigit() and tasks.isdigit() else None


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The tightest cgroup memory limit over this process; None where there is none below the machine's memory."""
    group = MemoryGroup.find(root)
    return None if group is None else group.limit_bytes


def memory_headroom_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still use: what is available on the machine, within the cgroup limit."""
    available = int(psutil.virtual_memory().available)
    group = MemoryGroup.find(root)
    used = None if group is None else group.used_bytes()
    return available if group is None or used is None else max(0, min(available, group.limit_bytes - used))


def shared_memory_bytes(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Total and free bytes of /dev/shm, through which loader workers pass batches; None without it."""
    try:
        usage = shutil.disk_usage(root / "dev/shm")
    except OSError:
        return None, None
    return usage.total, usage.free


class HostProbe:
    """Reads the host and the process tree under ``root_pid`` (default: this process)."""

    def __init__(
        self, root_pid: int | None = None, *, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.root_pid = os.getpid() if root_pid is None else root_pid
        self._root = root
        self._clock = clock
        self._tree = ProcessTree(self.root_pid, clock)
        self._group = MemoryGroup.find(root)
        self._tree_cpu_pct = self._tree.cpu_pct()
        self._counters = read_counters(clock())
        self._rates = HostReading()

    def read(self) -> HostReading:
        """One reading; rates and CPU shares are means since the reading before, or since the probe was made."""
        now_s = self._clock()
        if now_s - self._counters.at_s >= _MIN_INTERVAL_S:
            counters = read_counters(now_s)
            self._rates = rates_between(self._counters, counters)
            self._counters, self._tree_cpu_pct = counters, self._tree.cpu_pct()
        memory = psutil.virtual_memory()
        group = self._group
        used = None if group is None else group.used_bytes()
        shm_total_bytes, shm_free_bytes = shared_memory_bytes(self._root)
        return replace(
            self._rates,
            load_1min=_load_1min(),
            mem_total_bytes=int(memory.total),
            mem_used_bytes=int(memory.total - memory.available) if used is None else used,
            mem_limit_bytes=None if group is None else group.limit_bytes,
            tree_pss_bytes=self._tree.pss_bytes(),
            tree_cpu_pct=self._tree_cpu_pct,
            shm_total_bytes=shm_total_bytes,
            shm_free_bytes=shm_free_bytes,
        )


def _load_1min() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None  # Windows has no such figure
