"""The watched job as a tree of processes: who belongs to it, and what CPU and memory it uses."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from fulltilt.probes.ration import Ration

# Walking /proc costs milliseconds on a large machine, and adding up page tables 5 to 10 ms for each GiB of each
# process. Together they stay under 0.3 % of a core; a first look at all processes may cost a quarter of a second.
_WALK_SHARE = 0.001
_PSS_SHARE = 0.0015
_PSS_FIRST_CREDIT_S = 0.25
_PSS_AT_ONCE_S = 0.05


class ProcessTree:
    """The process ``root_pid`` and everything it started."""

    def __init__(
        self, root_pid: int, clock: Callable[[], float] = time.monotonic, walk_share: float = _WALK_SHARE
    ) -> None:
        """``walk_share`` of a core may go into finding the members; a monitor outside of the job may spend more."""
        self.root_pid = root_pid
        self._clock = clock
        self._walks = Ration(walk_share)
        self._first_pss = Ration(_PSS_SHARE, _PSS_FIRST_CREDIT_S)
        self._next_pss = Ration(_PSS_SHARE)
        self._members: dict[int, psutil.Process] = {}
        self._cpu_s: dict[int, tuple[float, float]] = {}  # pid: (moment, CPU time up to then)
        self._pss: dict[int, tuple[float, int]] = {}  # pid: (moment, bytes)

    def pids(self) -> frozenset[int]:
        """The process ids of the tree, at most a few seconds old; empty once the root is gone."""
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

        Each process is measured again in turn as the ration allows; None until each has been measured once.
        Where the kernel does not tell PSS, memory of its own (USS) or its resident set stands for it.
        """
        members = self._walk()
        self._pss = {pid: known for pid, known in self._pss.items() if pid in members}
        deadline_s = time.perf_counter() + _PSS_AT_ONCE_S
        for pid in sorted(members, key=lambda pid: self._pss[pid][0] if pid in self._pss else float("-inf")):
            ration = self._next_pss if pid in self._pss else self._first_pss
            if not ration.due() or time.perf_counter() >= deadline_s:
                break
            with ration.spend():
                self._pss[pid] = (time.perf_counter(), proportional_bytes(pid))
        return sum(size for _, size in self._pss.values()) if members and len(self._pss) == len(members) else None

    def _walk(self) -> dict[int, psutil.Process]:
        if self._walks.due():
            with self._walks.spend():
                try:
                    root = psutil.Process(self.root_pid)
                    found = [root, *root.children(recursive=True)]
                except psutil.Error:
                    found = []
                self._members = {process.pid: process for process in found}
        return self._members


def proportional_bytes(pid: int) -> int:
    """Memory of a process, pages that it shares counted in part (PSS), or the nearest to it that the system tells."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:  # noqa: PTH123 - the fast way, every second
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux, an old kernel, or the process has gone
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except (psutil.Error, OSError, AttributeError):
        pass
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, OSError):
        return 0  # it has gone, and holds nothing
