"""Who holds memory on a GPU, told apart into the watched job and others.

The driver knows nothing of PID namespaces: inside a container it names processes by the host's numbers, or by 0.
A number that cannot be found here may therefore be our own process. Such a process counts as ours: calling the
user's own job a stranger would be a false alarm, and a stranger in another container cannot be told by its number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from fulltilt.probes.nvml import Nvml
from fulltilt.records import GpuProcess

# Linux gives the first PID namespace this inode number (PROC_PID_INIT_INO). In it, the driver's numbers are ours.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC


class Tenants:
    """Reads the compute processes on a GPU (MPS clients included). Ours are ``root_pid`` and all that it started."""

    def __init__(self, nvml: Nvml, root_pid: int, proc: Path = Path("/proc")) -> None:
        self._nvml = nvml
        self._root_pid = root_pid
        self._proc = proc
        self._same_numbers = _numbers_are_the_drivers(proc)
        self._known: dict[tuple[int, float | None], tuple[str | None, bool]] = {}  # (pid, start): name, ours

    def read(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        """The processes in order of their ids; None where the driver does not tell. Raises GpuLost."""
        compute = self._running("nvmlDeviceGetComputeRunningProcesses", handle)
        if compute is None:
            return None
        held: dict[int, int | None] = {}
        for process in (*compute, *(self._running("nvmlDeviceGetMPSComputeRunningProcesses", handle) or ())):
            held[process.pid] = max(held.get(process.pid) or 0, process.usedGpuMemory or 0) or None
        return tuple(GpuProcess(pid, name, held[pid], ours) for pid in sorted(held) for name, ours in [self._who(pid)])

    def _running(self, function: str, handle: Any) -> Any:
        # The third version needs a driver from 510 on; the unversioned name raises a foreign exception type.
        found = self._nvml.query(f"{function}_v3", handle)
        return found if found is not None else self._nvml.query(f"{function}_v2", handle)

    def _who(self, pid: int) -> tuple[str | None, bool]:
        """Name of a process, and whether it is ours: found out once, since numbers are used again but not starts."""
        try:
            process = psutil.Process(pid) if pid else None
            key = (pid, None if process is None else process.create_time())
        except psutil.Error:
            process, key = None, (pid, None)
        if key not in self._known:
            if len(self._known) > 256:
                self._known.clear()  # a monitor that runs for weeks sees many processes
            self._known[key] = self._look(pid, process)
        return self._known[key]

    def _look(self, pid: int, process: psutil.Process | None) -> tuple[str | None, bool]:
        try:
            if process is not None:
                if self._root_pid in (pid, *(parent.pid for parent in process.parents())):
                    return process.name(), True
                if self._same_numbers or self._uses_a_gpu(pid):
                    return process.name(), False
        except psutil.Error:
            pass  # it ended while we looked
        path = self._nvml.query("nvmlSystemGetProcessName", pid) if pid else None
        name = None if not path else str(path).replace("\\", "/").rsplit("/", 1)[-1]
        return name, pid == 0 or not self._same_numbers

    def _uses_a_gpu(self, pid: int) -> bool:
        """Whether the process that has this number here has an NVIDIA device open. False if one cannot look."""
        try:
            links = (self._proc / str(pid) / "fd").iterdir()
            return any(str(link.readlink()).startswith("/dev/nvidia") for link in links)
        except OSError:
            return False


def _numbers_are_the_drivers(proc: Path) -> bool:
    try:
        return (proc / "self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return not (proc / "self").exists()  # Windows has no PID namespaces; a Linux that hides them may have one
