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
from fulltilt.probes.tree import ProcessTree
from fulltilt.records import GpuProcess

# Linux gives the first PID namespace this inode number (PROC_PID_INIT_INO). In it, the driver's numbers are ours.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC


class Tenants:
    """Reads the compute processes on a GPU (MPS clients included)."""

    def __init__(self, nvml: Nvml, tree: ProcessTree, proc: Path = Path("/proc")) -> None:
        self._nvml = nvml
        self._tree = tree
        self._proc = proc
        self._same_numbers = _numbers_are_the_drivers(proc)
        self._names: dict[int, str | None] = {}

    def read(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        """The processes in order of their ids; None where the driver does not tell. Raises GpuLost."""
        compute = self._running("nvmlDeviceGetComputeRunningProcesses", handle)
        if compute is None:
            return None
        held: dict[int, int | None] = {}
        for process in (*compute, *(self._running("nvmlDeviceGetMPSComputeRunningProcesses", handle) or ())):
            held[process.pid] = max(held.get(process.pid) or 0, process.usedGpuMemory or 0) or None
        return tuple(GpuProcess(pid, self._name(pid), held[pid], self._is_ours(pid)) for pid in sorted(held))

    def _running(self, function: str, handle: Any) -> Any:
        # The third version needs a driver from 510 on; the unversioned name raises a foreign exception type.
        found = self._nvml.query(f"{function}_v3", handle)
        return found if found is not None else self._nvml.query(f"{function}_v2", handle)

    def _is_ours(self, pid: int) -> bool:
        if pid in self._tree.pids():
            return True
        if self._same_numbers and pid != 0:
            return False
        return not self._uses_a_gpu(pid)

    def _uses_a_gpu(self, pid: int) -> bool:
        """Whether a process of this number, seen from here, has an NVIDIA device open. False if one cannot look."""
        try:
            links = list((self._proc / str(pid) / "fd").iterdir()) if pid else []
            return any(str(link.readlink()).startswith("/dev/nvidia") for link in links)
        except OSError:
            return False

    def _name(self, pid: int) -> str | None:
        if pid not in self._names:
            if len(self._names) > 256:
                self._names.clear()  # a monitor that runs for weeks sees many processes
            self._names[pid] = self._ask_name(pid)
        return self._names[pid]

    def _ask_name(self, pid: int) -> str | None:
        if pid == 0:
            return None
        try:
            if self._same_numbers or pid in self._tree.pids() or self._uses_a_gpu(pid):
                return psutil.Process(pid).name()
        except psutil.Error:
            pass
        path = self._nvml.query("nvmlSystemGetProcessName", pid)
        return None if not path else str(path).replace("\\", "/").rsplit("/", 1)[-1]


def _numbers_are_the_drivers(proc: Path) -> bool:
    try:
        return (proc / "self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return not (proc / "self").exists()  # Windows has no PID namespaces; a Linux that hides them may have one
