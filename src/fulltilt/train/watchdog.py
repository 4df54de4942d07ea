"""A thread that ends the process when the loop has made no progress for too long: stacks first, no orphans after.

A hung collective or loader cannot be interrupted from within; the process has to go, so that torchrun can end the
others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import psutil

from fulltilt import store
from fulltilt.errors import FulltiltError, MachineError

EXIT_CODE = MachineError.exit_code
# Workers write their stacks on this signal; see `listen_in_worker`.
_STACK_SIGNAL = getattr(signal, "SIGUSR2", None)


class Watchdog:
    """Watches over the loop from its own thread. ``beat`` says what the loop is about to do."""

    def __init__(self, timeout_s: float, log: Path, resume_hint: str = "") -> None:
        self.timeout_s = timeout_s
        self.log = log
        self.resume_hint = resume_hint
        self._doing = "starting"
        self._beats = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fulltilt-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def beat(self, doing: str) -> None:
        """The loop is alive and about to do this."""
        self._doing = doing
        self._beats += 1

    def _watch(self) -> None:
        pause_s = min(self.timeout_s / 10, 1.0)
        stall = StallTimer(pause_s, time.monotonic())
        while not self._over.wait(pause_s):
            if stall.seen_s(self._beats, time.monotonic()) > self.timeout_s:
                self._end_everything()

    def _end_everything(self) -> None:
        children = psutil.Process().children(recursive=True)
        with contextlib.suppress(OSError, FulltiltError), _opened(self.log) as file:
            file.write(f"no progress for {self.timeout_s:g} s while {self._doing}; stacks of process {os.getpid()}:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        if _STACK_SIGNAL is not None:
            for child in children:
                if _handles(child.pid, _STACK_SIGNAL):
                    with contextlib.suppress(psutil.Error):
                        child.send_signal(_STACK_SIGNAL)
            time.sleep(min(0.5, self.timeout_s / 10))  # the workers write their stacks meanwhile
        print(
            f"fulltilt: no progress for {self.timeout_s:g} s while {self._doing}; all stacks are in {self.log}\n"
            f"  Raise hang_timeout_s if that may take so long. {self.resume_hint}".rstrip(),
            file=sys.stderr,
            flush=True,
        )
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(EXIT_CODE)


class StallTimer:
    """How long nothing has moved, as far as we were there to see it.

    A process that was stopped (Ctrl-Z, a suspended Slurm job, a paused container) has not hung meanwhile.
    """

    def __init__(self, pause_s: float, now_s: float) -> None:
        self._pause_s, self._looked_s = pause_s, now_s
        self._beats = 0
        self._still_s = 0.0

    def seen_s(self, beats: int, now_s: float) -> float:
        """Look again, about ``pause_s`` after the last time: seconds in which the number of beats stayed the same."""
        passed_s = min(now_s - self._looked_s, 2.0 * self._pause_s)
        self._still_s = self._still_s + passed_s if beats == self._beats else 0.0
        self._looked_s, self._beats = now_s, beats
        return self._still_s


def _opened(log: Path) -> TextIO:
    folder = store.OwnedFolder.around(log)
    if folder is None:
        raise FileNotFoundError(log)
    return os.fdopen(folder.append(log), "a", encoding="utf-8")


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: to any other it would be deadly."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def listen_in_worker(log: Path) -> None:
    """In a loader worker: write the stack into ``log`` when the watchdog asks for it."""
    if _STACK_SIGNAL is not None:
        with contextlib.suppress(OSError, FulltiltError):  # on another machine the folder may not be there
            file = _opened(log)  # open for as long as the worker lives
            faulthandler.register(_STACK_SIGNAL, file=file, all_threads=True)
