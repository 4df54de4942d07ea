"""Whom a signal was sent to: a process beside ours gets those that went to everybody, and tells of them.

`timeout`, schedulers, service managers and killpg() signal a whole group or job. The training has such a signal
already; passed on, it would come twice, and to many scripts the second one means "stop at once".
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time
from collections.abc import Set
from typing import NoReturn

# Whoever signals many processes needs less than this from the first to the last of them.
MEANWHILE_S = 0.1
LOOK_AROUND_S = 1.0
MESSAGE = struct.Struct("=id")  # the signal, and when it came
MOST_FILES = 65536


class Witness:
    """A second process of ours in the same group. ``signals`` are blocked: each is waited for."""

    def __init__(self, signals: Set[signal.Signals]) -> None:
        self._seen: dict[int, float] = {}
        self._pid: int | None = None
        with contextlib.suppress(OSError):  # no more processes or files: then every signal is passed on
            self._reading, writing = os.pipe()
            parent = os.getpid()
            self._pid = os.fork()
            if self._pid == 0:
                _stand_by(writing, signals, parent)
            os.close(writing)

    def saw(self, number: int) -> bool:
        """Whether a signal that has just reached this process went to the witness, too."""
        if self._pid is None:
            return False
        began_s = time.monotonic()
        while (left_s := began_s + MEANWHILE_S - time.monotonic()) > 0:
            if self._seen.pop(number, 0.0) >= began_s - MEANWHILE_S:
                return True
            if select.select([self._reading], [], [], left_s)[0]:
                told = os.read(self._reading, MESSAGE.size)
                if len(told) < MESSAGE.size:
                    return False  # it has died
                seen, when_s = MESSAGE.unpack(told)
                self._seen[seen] = when_s
        return False

    def dismiss(self) -> None:
        """It is no longer needed."""
        if self._pid is None:
            return
        pid, self._pid = self._pid, None
        os.close(self._reading)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _stand_by(writing: int, signals: Set[signal.Signals], parent: int) -> NoReturn:
    """What the witness does until it is killed or alone."""
    try:
        # Whoever reads our output must not wait for this process, nor the next run for its lock.
        os.closerange(0, writing)
        os.closerange(writing + 1, MOST_FILES)
        while os.getppid() == parent:
            got = signal.sigtimedwait(signals, LOOK_AROUND_S)
            if got is not None:
                os.write(writing, MESSAGE.pack(got.si_signo, time.monotonic()))
    finally:
        os._exit(0)
