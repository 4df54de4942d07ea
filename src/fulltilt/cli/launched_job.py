"""The process of a job under `fulltilt run`: signals meant for it reach it once, and we end as it ended.

`timeout`, schedulers, service managers and killpg() signal a whole group or job. The training has such a signal
already; passed on, it would come twice, and to many scripts the second one means "stop at once". A second process of
ours in the same group, which dies of any of them, tells which signals went to everybody.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable

# What others may send to `fulltilt run` and mean for the job.
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FROM_KERNEL = 128  # si_code of a signal that the terminal sent to the whole foreground group: the job has it already
WAIT_S = 0.25

# Whoever signals many processes needs less than this from the first to the last of them.
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
    """The job's process. Standard input, output and error are its own."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._signals = {getattr(signal, name) for name in FORWARDED if hasattr(signal, name)}
        self._posix = os.name == "posix" and hasattr(signal, "sigtimedwait")
        # Blocked before the child exists, so that no signal falls between: each one waits until it is forwarded.
        if self._posix:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._signals, signal.SIGCHLD})
            self._process = subprocess.Popen(
                command,
                env=environment,
                # Safe: no thread has been started yet. The job begins with the signals that we began with.
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before) and None,  # noqa: PLW1509
            )
            self._sentinel = self._start_sentinel()
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
                    self._process.wait(timeout=WAIT_S)
                except subprocess.TimeoutExpired:
                    pass
                except KeyboardInterrupt:
                    continue  # the console told the job as well
            else:
                got = signal.sigtimedwait({*self._signals, signal.SIGCHLD}, WAIT_S)
                if got is not None and got.si_signo != signal.SIGCHLD:
                    self._forward(got)
            tick()
        if self._posix and self._sentinel is not None:
            self._sentinel.kill()
            self._sentinel.wait()
        return self._process.returncode

    def _forward(self, got: signal.struct_siginfo) -> None:
        """Pass a signal on, unless the job has it already."""
        if got.si_code != FROM_KERNEL and not self._went_to_everybody(got.si_signo) and self._process.poll() is None:
            self._process.send_signal(got.si_signo)

    def _start_sentinel(self) -> subprocess.Popen[bytes] | None:
        """The second process in our group; None where there is no room for it: then every signal is passed on."""
        numbers = [str(int(number)) for number in (os.getpid(), *self._signals)]
        nowhere = subprocess.DEVNULL  # whoever reads our output must not wait for it
        with contextlib.suppress(OSError):
            command = [sys.executable, "-I", "-S", "-c", DIES_OF_SIGNALS, *numbers]
            return subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
        return None

    def _went_to_everybody(self, number: int) -> bool:
        """Whether a signal that has just reached this process went to the whole group."""
        if self._sentinel is None:
            return False
        try:
            died_of = -self._sentinel.wait(SPREAD_S)
        except subprocess.TimeoutExpired:
            return False
        self._sentinel = self._start_sentinel()
        return died_of == number

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
