"""The process of a job under `fulltilt run`: it gets each signal exactly once, and we end the way it ended.

`timeout`, schedulers, service managers and killpg() signal the whole process group, so the training has the signal
already. Forwarded, it would arrive twice, and to many scripts the second one means "stop at once". A sentinel process
in the same group, which dies of any such signal, shows which signals went to the whole group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable

# Signals that are sent to `fulltilt run` but meant for the job: all, since a script may save on any of them (batch
# systems send SIGXCPU). Not those that nobody can catch, that stop and go on, that do nothing by default, or that say
# that we ourselves failed.
OURS = {"KILL", "STOP", "TSTP", "TTIN", "TTOU", "CONT", "CHLD", "WINCH", "URG", "PIPE"}
FAILURES = {"SEGV", "BUS", "FPE", "ILL", "TRAP", "ABRT", "SYS"}
FORWARDED = signal.valid_signals() - {signal.Signals[f"SIG{name}"] for name in OURS | FAILURES}
FROM_KERNEL = 128  # si_code where the terminal signalled the whole foreground group: the job has it already
WAIT_S = 0.25
PR_SET_PDEATHSIG = 1

# A sender that signals a group reaches all of its processes within this time.
SPREAD_S = 0.1
DIES_OF_SIGNALS = """
import os, signal, sys, time
parent, *numbers = map(int, sys.argv[1:])
for number in numbers:
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
while os.getppid() == parent:
    time.sleep(1)
"""


class LaunchedJob:
    """The job's process; it inherits standard input, output and error."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        libc = ctypes.CDLL(None)
        # Blocked before the child exists, so that none is lost: each one waits until it is forwarded.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})

        def begin() -> None:
            """In the child: the signals that we began with; whoever kills us kills the job, as in a plain run."""
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        self._process = subprocess.Popen(
            command,
            env=environment,
            close_fds=False,  # a shell's <(...) is a descriptor; our own are closed on exec anyway
            preexec_fn=begin,  # noqa: PLW1509 - safe: no thread has been started yet
        )
        self._sentinel = self._start_sentinel()

    @property
    def pid(self) -> int:
        """The job's process id."""
        return self._process.pid

    def wait(self, tick: Callable[[], None]) -> int:
        """Wait for the job's end, calling ``tick`` a few times a second. Returns its code, or minus its signal."""
        while self._process.poll() is None:
            got = signal.sigtimedwait({*FORWARDED, signal.SIGCHLD}, WAIT_S)
            if got is not None and got.si_signo != signal.SIGCHLD:
                self._forward(got)
            tick()
        if self._sentinel is not None:
            self._sentinel.kill()
            self._sentinel.wait()
        return self._process.returncode

    def _forward(self, got: signal.struct_siginfo) -> None:
        if got.si_code != FROM_KERNEL and not self._went_to_group(got.si_signo) and self._process.poll() is None:
            self._process.send_signal(got.si_signo)

    def _start_sentinel(self) -> subprocess.Popen[bytes] | None:
        """The sentinel; None where no process can be started: then every signal is forwarded."""
        numbers = [str(int(number)) for number in (os.getpid(), *FORWARDED)]
        nowhere = subprocess.DEVNULL  # a reader of our output must not wait for the sentinel
        with contextlib.suppress(OSError):
            command = [sys.executable, "-I", "-S", "-c", DIES_OF_SIGNALS, *numbers]
            return subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
        return None

    def _went_to_group(self, number: int) -> bool:
        """Whether the signal that has just arrived went to the whole group."""
        if self._sentinel is None:
            return False
        try:
            died_of = -self._sentinel.wait(SPREAD_S)
        except subprocess.TimeoutExpired:
            return False
        self._sentinel = self._start_sentinel()
        return died_of == number

    def leave(self, status: int) -> int:
        """Die of the signal that ended the job, or return the exit code to use."""
        sys.stdout.flush()
        sys.stderr.flush()
        if status >= 0:
            return status
        number = -status
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the job has left its own core dump, if any
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        return 128 + number
