"""The jobs on this machine: processes on a GPU, and those that Fulltilt records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil

from fulltilt.probes.host import ProcessTree
from fulltilt.probes.rate_limit import RateLimit
from fulltilt.records import GpuProcess, JobProcess

# `fulltilt run` sets this in the environment of the job, and thereby of every process under it.
RUN_FOLDER_VARIABLE = "FULLTILT_RUN_DIR"

# Reading every process of a large machine takes a tenth of a second. Workers come and go with every epoch, so the tree
# of each job is walked more often than the job itself could afford.
_SCAN_SHARE = 0.01
_WALK_SHARE = 0.01


class JobProbe:
    """Finds the jobs and reads their process trees."""

    def __init__(self) -> None:
        self._scans = RateLimit(_SCAN_SHARE)
        self._processes: dict[int, psutil.Process] = {}
        self._parents: dict[int, int] = {}
        self._folders: dict[int, str | None] = {}
        self._trees: dict[int, ProcessTree] = {}

    def read(self, on_gpus: Iterable[GpuProcess] = ()) -> tuple[JobProcess, ...]:
        """The processes on GPUs, then the root processes of recorded runs without a process on a GPU."""
        if self._scans.due():
            with self._scans.spend():
                self._scan()
        names = {process.pid: process.name for process in on_gpus}
        covered = {above for pid in names for above in (pid, *self._ancestors(pid))}
        roots = [
            pid
            for pid, folder in self._folders.items()
            if folder is not None and self._folders.get(self._parents[pid]) != folder and pid not in covered
        ]
        self._trees = {
            pid: self._trees.get(pid) or ProcessTree(pid, walk_share=_WALK_SHARE) for pid in (*names, *roots)
        }
        jobs = [self._describe(pid, names.get(pid)) for pid in (*names, *roots)]
        return tuple(job for job in jobs if job.name is not None or job.pid in names)  # without roots that have ended

    def _scan(self) -> None:
        self._processes = {process.pid: process for process in psutil.process_iter(["ppid", "environ"])}
        self._parents = {pid: process.info["ppid"] or 0 for pid, process in self._processes.items()}
        self._folders = {pid: _run_folder(process) for pid, process in self._processes.items()}

    def _ancestors(self, pid: int) -> Iterable[int]:
        passed = {pid}
        while (pid := self._parents.get(pid, 0)) and pid not in passed:
            passed.add(pid)
            yield pid

    def _describe(self, pid: int, name_on_gpu: str | None) -> JobProcess:
        name = None
        with contextlib.suppress(psutil.Error, KeyError):
            name = self._processes[pid].name()
        if name is None or name_on_gpu not in (None, name):
            # In a container the driver may use other numbers: this one is another process here.
            return JobProcess(pid, name_on_gpu)
        tree = self._trees[pid]
        return JobProcess(
            pid=pid,
            name=name,
            children=max(0, len(tree.pids()) - 1),
            cpu_pct=tree.cpu_pct(),
            pss_bytes=tree.pss_bytes(),
            run_folder=self._folders.get(pid),
        )


def still_running(folder: Path) -> tuple[int, ...]:
    """The processes of the run in this folder that are alive."""
    of_run = (process for process in psutil.process_iter(["environ"]) if _run_folder(process) == str(folder.resolve()))
    return tuple(process.pid for process in of_run)


def _run_folder(process: psutil.Process) -> str | None:
    """From the environment of the process; None for another user's process."""
    return (process.info["environ"] or {}).get(RUN_FOLDER_VARIABLE)
