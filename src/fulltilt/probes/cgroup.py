"""Mounted file systems, and the CPU and memory limits of cgroups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# --------------------------------------------------------------------------- mounts


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount. ``shows`` is the folder of the file system that appears at ``point``."""

    device_number: str
    shows: str
    point: str
    filesystem: str
    source: str
    options: tuple[str, ...]


def read_mounts(root: Path = Path("/")) -> tuple[Mount, ...]:
    """All mounts in the order they were made; empty without /proc."""
    try:
        lines = (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ()
    mounts = []
    for line in lines:
        # 36 35 98:0 /shows /point rw,noatime master:1 - ext3 /dev/source rw,errors=continue
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) >= 5 and len(kind) >= 3:
            shows, point, source = (_unescape(text) for text in (fields[3], fields[4], kind[1]))
            mounts.append(Mount(fields[2], shows, point, kind[0], source, tuple(kind[2].split(","))))
    return tuple(mounts)


def mount_of(folder: Path, mounts: tuple[Mount, ...]) -> Mount | None:
    """The mount of ``folder`` (an absolute path without links): the deepest, of several the last one made."""
    found = None
    for mount in mounts:
        if folder.is_relative_to(mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


# --------------------------------------------------------------------------- cgroup


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The tightest CPU quota of the cgroups of this process, in CPUs; None without a quota."""
    quotas = [quota for folder in _groups("cpu", root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _quota_of(group: Path) -> float | None:
    # Version 2 has "50000 100000" or "max 100000" in one file, version 1 two files; its quota of -1 is none.
    words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
    try:
        quota, period = map(int, words)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


class MemoryGroup:
    """The cgroup with the tightest memory limit for this process."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self.limit_bytes = limit_bytes

    @classmethod
    def find(cls, root: Path = Path("/")) -> MemoryGroup | None:
        """The group with the tightest limit; None where there is none below the machine's memory."""
        present = psutil.virtual_memory().total
        limits = ((folder, _memory_limit_of(folder)) for folder in _groups("memory", root))
        limited = [cls(folder, limit) for folder, limit in limits if limit is not None and limit < present]
        return min(limited, key=lambda group: group.limit_bytes, default=None)

    def used_bytes(self) -> int | None:
        """Memory of the group, without page cache that the kernel would drop before an allocation fails."""
        words = _words(self._folder / "memory.current") or _words(self._folder / "memory.usage_in_bytes")
        if not words or not words[0].isdigit():
            return None
        # Version 1 has both names; "total" includes the groups below, as the usage does.
        caches = (kernel_count(self._folder / "memory.stat", name) for name in ("total_inactive_file", "inactive_file"))
        return max(0, int(words[0]) - next((cache for cache in caches if cache), 0))


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has killed for lack of memory: of our own group, or of the whole machine."""
    names = ("memory.events", "memory.oom_control")  # version 2 and 1
    files = [folder / name for folder in _groups("memory", root) for name in names]
    counts = (kernel_count(file, "oom_kill") for file in (*files, root / "proc/vmstat"))
    return next((count for count in counts if count is not None), None)


def _memory_limit_of(group: Path) -> int | None:
    words = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
    return int(words[0]) if words and words[0].isdigit() else None  # version 2 has "max", version 1 a huge number


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's group and of those above it, for each cgroup version with the controller."""
    ours = _our_groups(root)
    for mount in read_mounts(root):
        if mount.filesystem == "cgroup2" and "" in ours:
            path = ours[""]
        elif mount.filesystem == "cgroup" and controller in mount.options and controller in ours:
            path = ours[controller]
        else:
            continue
        top = root / mount.point.lstrip("/")
        # A container without a cgroup namespace sees the host's path, of which the mount shows the lower part.
        shown = mount.shows.rstrip("/")
        folder = top / path.removeprefix(shown).strip("/") if f"{path}/".startswith(f"{shown}/") else top
        if ".." in folder.parts or not folder.is_dir():
            folder = top  # our group lies outside of what is mounted
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _our_groups(root: Path) -> dict[str, str]:
    """The path of our group for each controller; "" stands for version 2, which has one tree for all."""
    groups = {}
    for line in _lines(root / "proc/self/cgroup"):  # "4:cpu,cpuacct:/jobs/a", or "0::/jobs/a" for version 2
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def kernel_count(file: Path, name: str) -> int | None:
    """The number beside this name in a file of the kernel's such as /proc/vmstat; None where it has none."""
    words = _words(file)
    return int(words[words.index(name) + 1]) if name in words[:-1] else None


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()
