"""How soon an observing thread gets the interpreter lock when its look is due.

A look that comes late has slipped from a short stretch of Python code into the call behind it that gives up the lock
by itself, mostly one of torch's: the script's own code passes for compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time

# Whoever holds the lock gives it up this long after another thread asked for it; Python's own 5 ms are far too long.
# Where other threads run Python code they would all change places as often, so that they get longer turns.
ALONE_S, IN_COMPANY_S = 0.000005, 0.0001
# A call that keeps the lock for long (a sort, an HDF5 read) cannot be asked to give it up, and whoever waits for it
# asks again after every turn: short ones take 70 % of a core meanwhile. These take a few per cent, and see as much.
PATIENT_S = 0.0005
# A wait that took this much of the CPU was for such a call. So much of a core may go into them, and so much at once.
COSTLY_S, ALLOWED_SHARE, AT_ONCE_S = 0.0001, 0.005, 0.02
# The training thread and the observer.
WITHOUT_OTHERS = 2
PR_SET_TIMERSLACK = 29


class LockTurns:
    """The turns that an observing thread puts in force, by what its waiting for the lock has cost lately."""

    def __init__(self) -> None:
        self._left_s = AT_ONCE_S
        self._worked_s = 0.0
        self._waited_at_s = time.monotonic()

    def share(self) -> None:
        """Put the turns in force that suit the threads there are now; a script's own shorter ones stay."""
        now_s = sys.getswitchinterval()
        if now_s > IN_COMPANY_S or _is(now_s, ALONE_S) or _is(now_s, IN_COMPANY_S):
            sys.setswitchinterval(self._suitable_s())

    def begin_wait(self) -> None:
        """The observing thread is about to sleep until its next look."""
        self._worked_s = time.thread_time()

    def end_wait(self) -> None:
        """The look is due, and the lock is ours."""
        was_patient, cost_s, now_s = self._patient, time.thread_time() - self._worked_s, time.monotonic()
        earned_s = ALLOWED_SHARE * (now_s - self._waited_at_s)
        self._left_s = min(self._left_s + earned_s, AT_ONCE_S) - (cost_s if cost_s > COSTLY_S else 0.0)
        self._waited_at_s = now_s
        if self._patient is not was_patient:
            self.share()

    @property
    def _patient(self) -> bool:
        return self._left_s <= 0

    def _suitable_s(self) -> float:
        if self._patient:
            return PATIENT_S
        return ALONE_S if threading.active_count() <= WITHOUT_OTHERS else IN_COMPANY_S


def wake_on_time() -> None:
    """Let the calling thread be woken when it is due: by default Linux takes 50 µs more to save power."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


def _is(turn_s: float, known_s: float) -> bool:
    """Python keeps whole microseconds."""
    return abs(turn_s - known_s) < 0.5e-6
