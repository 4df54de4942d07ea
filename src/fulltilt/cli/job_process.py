"""The job as a child process: signals, standard streams and the way it ends pass through unchanged.

`timeout`, schedulers, service managers and killpg() signal a whole group or job. The training has such a signal
already; passed on, it would come twice, and to many scripts the second one means "stop at once". A second process of
ours in the same group tells which signals went to everybody.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Set
from typing import NoReturn

# What others may send to `fulltilt run` and mean for the job.
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FROM_KERNEL = 128  # si_code of a signal that the terminal sent to the whole foreground group: the job has it already
TICK_S = 0.25

# Whoever signals many processes needs less than this from the first to the last of them.
SPREAD_S = 0.1
CHECK_PARENT_S = 1.0
MESSAGE = struct.Struct("=id")  # the signal, and when it came
MOST_FILES = 65536


class JobProcess:
    """The job's process. Standard input, output and error are its own."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._signals = {getattr(signal, name) for name in FORWARDED if hasattr(signal, name)}
        self._posix = os.name == "posix" and hasattr(signal, "sigtimedwait")
        # Blocked before the child exists, so that no signal falls between: each one waits until it is forwarded.
        if self._posix:
            forwarded, self._signals = self._signals, {*self._signals, signal.SIGCHLD}
            before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
            self._process = subprocess.Popen(
                command,
                env=environment,
                # Safe: no thread has been started yet. The job begins with the signals that we began with.
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before) and None,  # noqa: PLW1509
            )
            self._monitor = SignalMonitor(forwarded)
        else:
            self._process = subprocess.Popen(command, env=environment)

    @property
    def pid(self) -> int:
        """The job's process id."""
        return self._process.pid

    def wait(self, tick: Callable[[], None]) -> int:
        """Wait for the job's end, calling ``tick`` a few times a second. Returns its code, or minus its signal."""
        while self._process.poll() is None:
            if not self._posix:
                try:
                    self._process.wait(timeout=TICK_S)
                except subprocess.TimeoutExpired:
                    pass
                except KeyboardInterrupt:
                    continue  # the console told the job as well
            else:
                got = signal.sigtimedwait(self._signals, TICK_S)
                if got is not None and got.si_signo != signal.SIGCHLD:
                    self._forward(got)
            tick()
        if self._posix:
            self._monitor.stop()
        return self._process.returncode

    def _forward(self, got: signal.struct_siginfo) -> None:
        """Pass a signal on, unless the job has it already."""
        if (
            got.si_code != FROM_KERNEL
            and not self._monitor.went_to_everybody(got.si_signo)
            and self._process.poll() is None
        ):
            self._process.send_signal(got.si_signo)

    def leave(self, status: int) -> int:
        """End as the job ended: by the same signal, or with the code that is returned here."""
        sys.stdout.flush()
        sys.stderr.flush()
        if status >= 0 or not self._posix:
            return status
        number = -status
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the job has left its own core dump, if any
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        return 128 + number


class SignalMonitor:
    """A second process of ours in the same group. ``signals`` are blocked: each is waited for."""

    def __init__(self, signals: Set[signal.Signals]) -> None:
        self._seen: dict[int, float] = {}
        self._pid: int | None = None
        with contextlib.suppress(OSError):  # no more processes or files: then every signal is passed on
            self._reading, writing = os.pipe()
            parent = os.getpid()
            self._pid = os.fork()
            if self._pid == 0:
                _monitor_signals(writing, signals, parent)
            os.close(writing)

    def went_to_everybody(self, number: int) -> bool:
        """Whether a signal that has just reached this process went to the whole group."""
        if self._pid is None:
            return False
        began_s = time.monotonic()
        while (left_s := began_s + SPREAD_S - time.monotonic()) > 0:
            if self._seen.pop(number, 0.0) >= began_s - SPREAD_S:
                return True
            if select.select([self._reading], [], [], left_s)[0]:
                told = os.read(self._reading, MESSAGE.size)
                if len(told) < MESSAGE.size:
                    return False  # it has died
                seen, when_s = MESSAGE.unpack(told)
                self._seen[seen] = when_s
        return False

    def stop(self) -> None:
        """It is no longer needed."""
        if self._pid is None:
            return
        pid, self._pid = self._pid, None
        os.close(self._reading)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _monitor_signals(writing: int, signals: Set[signal.Signals], parent: int) -> NoReturn:
    """What the second process does until it is killed or alone."""
    try:
        # Whoever reads our output must not wait for this process, nor the next run for its lock.
        os.closerange(0, writing)
        os.closerange(writing + 1, MOST_FILES)
        while os.getppid() == parent:
            got = signal.sigtimedwait(signals, CHECK_PARENT_S)
            if got is not None:
                os.write(writing, MESSAGE.pack(got.si_signo, time.monotonic()))
    finally:
        os._exit(0)
