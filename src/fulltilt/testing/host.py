"""A clock that tests move by hand, and control groups as files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# --------------------------------------------------------------------------- clock


class FakeClock:
    """Call it for the time in seconds; ``advance`` moves it."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """The time that it was set to."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move time forward."""
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self.now_s += seconds


# --------------------------------------------------------------------------- cgroup

_PERIOD_US = 100_000
_V1_NO_LIMIT = 9223372036854771712


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The limits and the use of one group. ``cache_bytes`` is the part of the use that could be dropped."""

    cpus: float | None = None
    memory_bytes: int | None = None
    used_bytes: int = 0
    cache_bytes: int = 0


def write_cgroups(
    root: Path,
    version: Literal["v1", "v2", "hybrid"],
    groups: Mapping[str, GroupLimits],
    *,
    own: str | None = None,
    shows: str = "/",
) -> Path:
    """Write a machine whose process lives in the last of ``groups`` (or in ``own``) and return its root.

    Hybrid has version 1 for the controllers and an empty version 2 beside it. ``shows`` is the part of the host's
    tree that is mounted, as in a container without a cgroup namespace.
    """
    own = list(groups)[-1] if own is None else own
    top = root / "sys/fs/cgroup"
    if version == "v2":
        for path, limits in groups.items():
            _write_v2(top / path.strip("/"), limits)
        table, ours = [f"29 24 0:26 {shows} /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"], [f"0::{own}"]
    else:
        for path, limits in groups.items():
            _write_v1(top, path.strip("/"), limits)
        table = [
            f"31 30 0:27 {shows} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
            f"32 30 0:28 {shows} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
        ]
        ours = [f"2:cpu,cpuacct:{own}", f"3:memory:{own}"]
        if version == "hybrid":
            (top / "unified").mkdir()
            table.append("33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw")
            ours.append("0::/")
    process = root / "proc/self"
    process.mkdir(parents=True)
    (process / "mountinfo").write_text("\n".join(["24 1 8:1 / / rw - ext4 /dev/sda1 rw", *table]) + "\n")
    (process / "cgroup").write_text("\n".join(ours) + "\n")
    return root


def _write_v2(folder: Path, limits: GroupLimits) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    quota = "max" if limits.cpus is None else str(int(limits.cpus * _PERIOD_US))
    (folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}\n")
    (folder / "memory.max").write_text("max\n" if limits.memory_bytes is None else f"{limits.memory_bytes}\n")
    (folder / "memory.current").write_text(f"{limits.used_bytes}\n")
    (folder / "memory.stat").write_text(f"anon 0\ninactive_file {limits.cache_bytes}\n")


def _write_v1(top: Path, path: str, limits: GroupLimits) -> None:
    cpu, memory = top / "cpu,cpuacct" / path, top / "memory" / path
    cpu.mkdir(parents=True, exist_ok=True)
    memory.mkdir(parents=True, exist_ok=True)
    quota_us = -1 if limits.cpus is None else int(limits.cpus * _PERIOD_US)
    (cpu / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (cpu / "cpu.cfs_period_us").write_text(f"{_PERIOD_US}\n")
    limit = _V1_NO_LIMIT if limits.memory_bytes is None else limits.memory_bytes
    (memory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (memory / "memory.usage_in_bytes").write_text(f"{limits.used_bytes}\n")
    (memory / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {limits.cache_bytes}\n")
