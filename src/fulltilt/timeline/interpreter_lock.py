"""How soon an observing thread gets the interpreter lock when its look is due.

A look that comes late has slipped from a short stretch of Python code into the call behind it that gives up the lock
by itself, mostly one of torch's: the script's own code passes for compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading

# Whoever holds the lock gives it up this long after another thread asked for it; Python's own 5 ms are far too long.
# Where other threads run Python code they would all change places as often, so that they get longer turns.
ALONE_S, IN_COMPANY_S = 0.00003, 0.0001
# The training thread and the observer.
WITHOUT_OTHERS = 2
PR_SET_TIMERSLACK = 29


def share_lock() -> None:
    """Put the turns in force that suit the threads there are now; a script's own shorter ones stay."""
    turn_s = ALONE_S if threading.active_count() <= WITHOUT_OTHERS else IN_COMPANY_S
    now_s = sys.getswitchinterval()
    if now_s > IN_COMPANY_S or _is(now_s, ALONE_S) or _is(now_s, IN_COMPANY_S):
        sys.setswitchinterval(turn_s)


def wake_on_time() -> None:
    """Let the calling thread be woken when it is due: by default Linux takes 50 µs more to save power."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


def _is(turn_s: float, known_s: float) -> bool:
    """Python keeps whole microseconds."""
    return abs(turn_s - known_s) < 0.5e-6
