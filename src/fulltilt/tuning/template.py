"""The process that trials are forked from: the user's script, run once up to where its settings begin to matter.

Importing torch and the script's own modules takes longer than most trials measure. So one process runs the script until
it first touches what a fork cannot share or what settings change: a DataLoader, the GPU, a thread, another process or a
process group. There it waits, and each trial is a fork that goes on from that very call. Every trial thus has run the
same lines in the same state, the random numbers included. Where a fork is not safe it says so, and trials start anew.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing.process
import os
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulltilt.recorder import attach
from fulltilt.tuning import early
from fulltilt.tuning.saves import Saves

CHANNEL = "FULLTILT_TEMPLATE"
LOOK_EVERY_S = 0.02


class Template:
    """Waits for the first touch, then serves forks over a pair of pipes: a JSON object a line."""

    def __init__(self, torch: Any, requests: int, replies: int, scratch: Path) -> None:
        self._torch = torch
        self._requests = os.fdopen(requests, "r", encoding="utf-8")
        self._replies = os.fdopen(replies, "w", encoding="utf-8")
        self._saves = early.taken_over() or Saves(scratch)
        self._undo: list[Callable[[], None]] = []
        self._stops: list[tuple[Any, str]] = []
        self._behind: dict[tuple[Any, str], Callable[..., Any]] = {}
        self._touched = False
        self._torch_threads = int(torch.get_num_threads())

    @classmethod
    def of_environment(cls, torch: Any) -> Template:
        """The template that the study asked this process to be."""
        requests, replies = map(int, os.environ.pop(CHANNEL).split(","))
        return cls(torch, requests, replies, Path(os.environ[early.SCRATCH]))

    def install(self) -> None:
        """Stand before everything that a fork cannot share."""
        torch = self._torch
        self._saves.install()
        self._postpone_threads()
        self._stop_before(torch.utils.data.DataLoader, "__init__")
        for module in _modules_that_start_the_gpu(torch):
            self._stop_before(module, "_lazy_init")
        self._stop_before(threading.Thread, "start")
        self._stop_before(multiprocessing.process.BaseProcess, "start")
        if hasattr(os, "fork"):
            self._stop_before(os, "fork")  # the child would take itself for the template
        if torch.distributed.is_available():
            self._stop_before(torch.distributed, "init_process_group")

    def _postpone_threads(self) -> None:
        """Compute on one thread until the fork: a pool of OpenMP threads does not survive it, and one makes no pool."""
        torch = self._torch
        set_threads, get_threads = torch.set_num_threads, torch.get_num_threads

        def set_num_threads(count: int) -> None:
            self._torch_threads = int(count)

        def back() -> None:
            torch.set_num_threads, torch.get_num_threads = set_threads, get_threads

        set_threads(1)
        torch.set_num_threads, torch.get_num_threads = set_num_threads, lambda: self._torch_threads
        self._undo.append(back)

    def _stop_before(self, home: Any, name: str) -> None:
        original = getattr(home, name)

        @functools.wraps(original)
        def stop(*args: Any, **kwargs: Any) -> Any:
            self._serve_once()
            return self._behind.get((home, name), original)(*args, **kwargs)

        setattr(home, name, stop)
        self._stops.append((home, name))
        self._undo.append(lambda: setattr(home, name, original))

    def _serve_once(self) -> None:
        if self._touched or threading.current_thread() is not threading.main_thread():
            return
        self._touched = True
        while self._undo:
            self._undo.pop()()
        early.handed_on(self._saves)
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._dynamo")  # as any optimizer does when it is made, for seconds
        self._serve()
        # In the fork the recorder has put new guards in place. Only now: Lightning wraps DataLoader's for a while, and
        # puts back what it found, so that a stop that is over is called again.
        self._behind = {(home, name): getattr(home, name) for home, name in self._stops}

    # ------------------------------------------------------------------ serving

    def _serve(self) -> None:
        """Fork a trial for each request. Returns only in the forks, which go on with the script."""
        unsafe = self._why_unsafe()
        self._say(ready=unsafe is None, why=unsafe)
        offsets = _file_offsets()
        for line in iter(self._requests.readline, ""):
            request = json.loads(line)
            for descriptor, offset in offsets.items():
                os.lseek(descriptor, offset, os.SEEK_SET)  # the last trial may have read on
            os.environ.update(request["environment"])
            attach.tell(request["environment"])
            pid = os.fork()
            if pid == 0:
                self._become_a_trial(request["output"])
                return
            self._say(pid=pid)
            self._say(status=self._wait_for(pid))
        os._exit(0)

    def _become_a_trial(self, output: str) -> None:
        os.setsid()  # a group of its own, which can be killed as a whole
        self._requests.close()
        self._replies.close()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        self._torch.set_num_threads(self._torch_threads)
        cuda = self._torch.cuda
        if cuda._is_in_bad_fork() and cuda.device_count() > 0:  # without a GPU, asking for one does no harm
            print("fulltilt: the GPU was touched before the fork", file=sys.stderr)
            os._exit(CANNOT_FORK)

    def _wait_for(self, pid: int) -> int:
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            readable, _, _ = select.select([self._requests], [], [], LOOK_EVERY_S)
            if readable:  # nobody asks while a trial runs: the study is gone
                os.killpg(pid, 9)
                os._exit(0)

    def _why_unsafe(self) -> str | None:
        if self._torch.cuda.is_initialized():
            return "the GPU is in use already"
        if threading.active_count() > 1:
            return "it runs threads before its first loader"  # native ones know about forks or are found out by one
        return None

    def _say(self, **facts: Any) -> None:
        self._replies.write(json.dumps(facts) + "\n")
        self._replies.flush()


def _modules_that_start_the_gpu(torch: Any) -> list[Any]:
    """torch.cuda, and those of its modules that hold its ``_lazy_init`` by a name of their own (memory, random)."""
    start = torch.cuda._lazy_init
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch.cuda.")]
    return [torch.cuda, *(module for module in modules if getattr(module, "_lazy_init", None) is start)]


# The exit status of a fork that finds that it should not have been one.
CANNOT_FORK = 75


def _file_offsets() -> dict[int, int]:
    """Where this process stands in its open files: forks share the position with it."""
    offsets = {}
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else ():  # noqa: PTH208
        try:
            offsets[int(name)] = os.lseek(int(name), 0, os.SEEK_CUR)
        except OSError:
            continue  # a pipe or a terminal has no position
    return offsets
