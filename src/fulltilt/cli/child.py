"""The job as a child process: signals, standard streams and the way it ends pass through unchanged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

from fulltilt.cli.witness import Witness

# What others may send to `fulltilt run` and mean for the job.
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FROM_KERNEL = 128  # si_code of a signal that the terminal sent to the whole foreground group: the job has it already
TICK_S = 0.25


class Child:
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
            self._witness = Witness(forwarded)
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
            self._witness.dismiss()
        return self._process.returncode

    def _forward(self, got: signal.struct_siginfo) -> None:
        """Pass a signal on, unless the job has it already."""
        if got.si_code != FROM_KERNEL and not self._witness.saw(got.si_signo) and self._process.poll() is None:
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
