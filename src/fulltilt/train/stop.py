"""Requests to stop: signals and the time limit. While it trains, both only set a flag that the loop looks at between
steps; before and after, there is nothing to save, and a signal ends the command at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from fulltilt.errors import StoppedEarly

# What a job is told before it is taken off a machine: Slurm, Kubernetes and Kaggle use the first three; the last comes
# when the terminal or the connection that it was started from is closed.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name))

# When the command began, on the monotonic clock, for the ranks that it starts and starts again.
BEGAN = "FULLTILT_BEGAN_S"


@contextlib.contextmanager
def limits_count_from_here() -> Iterator[None]:
    """Within it, a time limit counts from now on, also in processes that are started; an outer call goes first.

    Who gives a command an hour means all of it: imports, data that is made or staged, a model that is downloaded.
    """
    if BEGAN in os.environ:
        yield
        return
    os.environ[BEGAN] = str(time.monotonic())
    try:
        yield
    finally:
        del os.environ[BEGAN]


# Whether Ctrl-C came while nothing was trained. Whoever is being imported, or a library, may have caught it.
_interrupted = False


def was_interrupted() -> bool:
    """Whether Ctrl-C came before or after training."""
    return _interrupted


@contextlib.contextmanager
def signals_end_it() -> Iterator[None]:
    """Within it, and while the loop does not listen, a signal that asks to stop ends the process with StoppedEarly's
    code: while torch is imported, data is made or staged, a model loads, there is no step to save. Nothing is raised:
    out of an import, that ends anywhere. Ctrl-C is raised as ever; if somebody catches it, the loop stops at once.

    Ranks are left alone: their launcher ends them when another one has failed, and that one's code is to be told.
    """
    global _interrupted
    if threading.current_thread() is not threading.main_thread() or "TORCHELASTIC_RUN_ID" in os.environ:
        yield
        return
    here = os.getpid()

    def stop(number: int, _frame: FrameType | None) -> None:
        global _interrupted
        if os.getpid() != here:  # a process that was forked meanwhile: its parent ends it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT:
            _interrupted = True
            raise KeyboardInterrupt
        else:
            name = signal.Signals(number).name
            os.write(2, f"fulltilt: received {name} before or after training; no step is lost\n".encode())
            os._exit(StoppedEarly.exit_code)

    try:
        with _handled([number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN], stop):
            yield
    finally:
        _interrupted = False


class StopRequest:
    """Why the run should stop at the next step, or None. A second Ctrl-C stops at once."""

    def __init__(
        self,
        max_time_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reason: str | None = "received SIGINT" if was_interrupted() else None
        self.max_time_s = max_time_s
        self._clock = clock
        self._began_s = float(os.environ.get(BEGAN) or clock())
        self._step_began_s = clock()
        self._longest_step_s = 0.0
        # torchrun's agent is our parent. If it is killed, nobody is left to end us.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within it, the signals set the flag. Outside the main thread nothing is changed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with _handled([number for number in SIGNALS if not ignored_by_nohup(number)], self._on_signal):
            yield

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("a second time")
        self.reason = f"received {signal.Signals(number).name}"

    def step_done(self, longest_save_s: float) -> None:
        """Note the end of a step, and ask to stop while there is still time for one more step and one save.

        ``longest_save_s`` is what a save has taken at most so far. Half as much again allows for a slow disk.
        """
        now = self._clock()
        self._longest_step_s = max(self._longest_step_s, now - self._step_began_s)
        self._step_began_s = now
        self.wanted(longest_save_s)

    def wanted(self, longest_save_s: float) -> bool:
        """Whether to stop, by now; for long stretches without a step."""
        if self.reason is None and self._launcher not in (None, os.getppid()):
            self.reason = "the launcher is gone"
        if self.reason is None and self.max_time_s is not None:
            reserve_s = 1.5 * longest_save_s + 2.0 * self._longest_step_s
            if self._clock() - self._began_s + reserve_s >= self.max_time_s:
                self.reason = f"the time limit of {self.max_time_s:g} s is near"
        return self.reason is not None

    def pause_done(self) -> None:
        """What came since the last step (evaluation, a save) was no step: do not count it as one."""
        self._step_began_s = self._clock()


@contextlib.contextmanager
def _handled(numbers: list[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)  # None: set by no Python code


def ignored_by_nohup(number: int) -> bool:
    """Whether the user has said, by nohup, that closing the terminal is to mean nothing."""
    return number == getattr(signal, "SIGHUP", None) and signal.getsignal(number) is signal.SIG_IGN
