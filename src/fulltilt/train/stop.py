"""What stops a run: signals, the time limit, and a watchdog over a loop that hangs.

During training, signals and the limit only set a flag that the loop checks between steps. Before and after, nothing
has to be saved, and a signal ends the command at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

import psutil

from fulltilt import store
from fulltilt.errors import FulltiltError, MachineError, StoppedEarly

# Slurm, Kubernetes and Kaggle send the first three before they end a job; SIGHUP comes when its terminal is closed.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# The shell's exit code for Ctrl-C.
INTERRUPTED = 130
# When the command began, on the monotonic clock, for the ranks that it starts.
BEGAN = "FULLTILT_BEGAN_S"


@contextlib.contextmanager
def limits_count_from_here() -> Iterator[None]:
    """Time limits count from here on, also in child processes; an outer call wins.

    A limit includes imports, making or staging data, and downloading a model.
    """
    if BEGAN in os.environ:
        yield
        return
    os.environ[BEGAN] = str(time.monotonic())
    try:
        yield
    finally:
        del os.environ[BEGAN]


@contextlib.contextmanager
def signals_end_it() -> Iterator[None]:
    """A signal ends the process at once, except while the loop listens: before training there is no step to save.

    Nothing is raised, since an import may catch it. Ranks keep the default, for their launcher to end them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        yield
        return
    here = os.getpid()

    def stop(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != here:  # in a forked child
            _end_by(number)
        name = signal.Signals(number).name
        os.write(2, f"fulltilt: received {name} before or after training; no step is lost\n".encode())
        os._exit(INTERRUPTED if number == signal.SIGINT else StoppedEarly.exit_code)

    with stop_signals_to(stop):
        yield


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class StopRequest:
    """Why the run should stop at the next step, or None. A second Ctrl-C stops at once."""

    def __init__(self, max_time_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason: str | None = None
        self._pid = os.getpid()
        self.max_time_s = max_time_s
        self._clock = clock
        self._began_s = float(os.environ.get(BEGAN) or clock())
        self._step_began_s: float | None = None  # the first step is left out: it fills tiers and compiles
        self._longest_step_s = 0.0
        # torchrun's agent is our parent: if it is killed, nobody else ends us.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Signals set the flag."""
        return stop_signals_to(self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid and number == signal.SIGTERM:
            from torch.utils.data import get_worker_info  # `fulltilt train --help` does without torch

            if get_worker_info() is None:  # a loader's worker is needed for one more step
                _end_by(number)  # a Pool waits for it
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("a second time")
        self.reason = f"received {signal.Signals(number).name}"

    def step_done(self, longest_save_s: float) -> None:
        """Note the end of a step, and ask to stop while there is still time for one more step and one save.

        ``longest_save_s``: of all saves so far; half as much is added for a slow disk.
        """
        now = self._clock()
        if self._step_began_s is not None:
            self._longest_step_s = max(self._longest_step_s, now - self._step_began_s)
        self._step_began_s = now
        self.wanted(longest_save_s)

    def wanted(self, longest_save_s: float) -> bool:
        """Whether to stop now; for long stretches without a step."""
        if self.reason is None and self._launcher not in (None, os.getppid()):
            self.reason = "the launcher is gone"
        if self.reason is None and self.max_time_s is not None:
            reserve_s = 1.5 * longest_save_s + 2.0 * self._longest_step_s
            if self._clock() - self._began_s + reserve_s >= self.max_time_s:
                self.reason = f"the time limit of {self.max_time_s:g} s is near"
        return self.reason is not None

    def pause_done(self) -> None:
        """The time since the last step was an evaluation or a save: do not count it as a step."""
        self._step_began_s = self._clock()


@contextlib.contextmanager
def stop_signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """``handler`` gets the signals that ask a run to stop, except SIGHUP under nohup.

    Nothing is changed outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)  # None: set by no Python code


# --------------------------------------------------------------------------- the watchdog


# Workers write their stacks on this signal; see `listen_in_worker`.
_STACK_SIGNAL = signal.SIGUSR2


class Watchdog:
    """A thread that writes all stacks and ends the process, with its children, when the loop makes no progress.

    A hung collective or loader cannot be interrupted; torchrun ends the other ranks when the process is gone.
    """

    def __init__(self, timeout_s: float, log: Path) -> None:
        self.timeout_s, self.log = timeout_s, log
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
        beats, pauses = 0, 0
        # Pauses are counted instead of seconds: a stopped process (Ctrl-Z, a paused container) has not hung.
        while not self._over.wait(pause_s):
            beats, pauses = self._beats, pauses + 1 if self._beats == beats else 0
            if pauses * pause_s > self.timeout_s:
                self._end_everything()

    def _end_everything(self) -> None:
        children = psutil.Process().children(recursive=True)
        told = f"no progress for {self.timeout_s:g} s while {self._doing}"
        with contextlib.suppress(OSError, FulltiltError), opened_log(self.log) as file:
            file.write(f"{told}; stacks of process {os.getpid()}:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        for child in children:  # kills those that do not listen, as the next loop does
            with contextlib.suppress(psutil.Error):
                child.send_signal(_STACK_SIGNAL)
        time.sleep(min(0.5, self.timeout_s / 10))  # the workers write their stacks meanwhile
        print(
            f"fulltilt: {told}; all stacks are in {self.log}\n  Raise hang_timeout_s if that may take so long.",
            file=sys.stderr,
            flush=True,
        )
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(MachineError.exit_code)


def opened_log(log: Path) -> TextIO:
    """Open a log in a claimed folder to append to it. Raises OSError, ForeignFiles."""
    folder = store.OwnedFolder.around(log)
    if folder is None:
        raise FileNotFoundError(log)
    return os.fdopen(folder.append(log, 0o600), "a", encoding="utf-8")


def listen_in_worker(log: Path) -> None:
    """In a loader worker: write the stack into ``log`` when the watchdog asks for it."""
    with contextlib.suppress(OSError, FulltiltError):  # the folder may be on another machine
        file = opened_log(log)  # open for as long as the worker lives
        faulthandler.register(_STACK_SIGNAL, file=file, all_threads=True)
