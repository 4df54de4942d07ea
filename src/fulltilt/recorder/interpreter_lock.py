"""Who has the interpreter lock: how soon an observing thread gets it, and which of the job's threads take it as well.

A sample that comes late falls not on a short stretch of Python code but on the next call that releases the lock by
itself, mostly one of torch's: the script's own code would count as compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import threading
import time

from fulltilt.probes.rate_limit import RateLimit
from fulltilt.recorder.marks import Totals
from fulltilt.recorder.stacks.frames import stack_of, view_of
from fulltilt.recorder.stacks.line_times import LineTimes
from fulltilt.records import ThreadRecord

# The switch interval: how long after another thread's request a thread releases the lock. Python's own 5 ms are far too
# long. Where more threads run Python code, all of them would switch as often: they get longer turns.
ALONE_S, OTHERS_S = 0.000005, 0.0001
# A long call that keeps the lock (a sort, an HDF5 read) cannot be interrupted, and who waits for it asks again after
# every turn: with short turns that takes 70 % of a core. These take a few per cent, and samples are as good.
PATIENT_S = 0.0005
# A wait that took this much CPU time was mostly for such a call, or for a thread that holds the lock and has no CPU. In
# the latter case longer turns would miss all short stretches, so samples become fewer instead.
COSTLY_S = 0.0001
# Shares of a core that waiting for calls, and for threads without a CPU, may take, and the most at once.
FOR_CALLS, FOR_CPUS, AT_ONCE_S = 0.01, 0.02, 0.05
# Stack samples become fewer until they cost this share, up to this interval.
CROWDED_SHARE, LONGEST_EVERY_S, REMEMBERED_SAMPLES = 0.01, 0.05, 50
WITHOUT_OTHERS = 1  # the training thread; ours are left out
PR_SET_TIMERSLACK = 29
CLOCK_OF_A_THREAD = 6  # CPUCLOCK_PERTHREAD_MASK and CPUCLOCK_SCHED
# Lines are noted for threads that ran for at least this share of the time.
BUSY_SHARE = 0.05
MOST_NAMES = 64


class SwitchInterval:
    """Sets the switch interval by what an observing thread's waiting for the lock has cost lately."""

    def __init__(self) -> None:
        self._for_calls = RateLimit(FOR_CALLS, AT_ONCE_S, clock=time.monotonic)
        self._for_cpus = RateLimit(FOR_CPUS, AT_ONCE_S, clock=time.monotonic)
        self._scripts_s = sys.getswitchinterval()
        self._patient = False  # more was spent than may be
        self._crowded_s = 0.0  # what a sample costs for want of CPUs, lately
        self._worked_s = self._began_s = time.monotonic()
        self._clock: int | None = None
        self._observed_s = 0.0

    def apply(self) -> None:
        """Set the interval that suits the present threads; a script's own shorter one stays."""
        now_s = sys.getswitchinterval()
        if not self._is_ours(now_s):
            self._scripts_s = now_s
        if self._is_ours(now_s) or now_s > OTHERS_S:
            sys.setswitchinterval(self._suitable_s())

    def restore(self) -> None:
        """Put back the script's own interval, unless the script has set another one since."""
        if self._is_ours(sys.getswitchinterval()):
            sys.setswitchinterval(self._scripts_s)

    def _is_ours(self, now_s: float) -> bool:
        return min(abs(now_s - ours_s) for ours_s in (ALONE_S, OTHERS_S, PATIENT_S)) < 0.5e-6  # whole microseconds

    def every_s(self, usual_s: float) -> float:
        """The interval between samples: ``usual_s``, or more where samples cost too much."""
        return max(usual_s, min(self._crowded_s / CROWDED_SHARE, LONGEST_EVERY_S))

    def begin_wait(self, observed: int | None) -> None:
        """The observing thread is about to sleep until its next sample of a thread with this CPU clock."""
        self._clock = observed
        self._observed_s = cpu_s(observed) or 0.0
        self._worked_s, self._began_s = time.thread_time(), time.monotonic()

    def end_wait(self) -> None:
        """The sample is due, and this thread has the lock."""
        cost_s = time.thread_time() - self._worked_s
        if cost_s <= COSTLY_S and not self._patient:  # mostly so: nothing to charge, and no debt
            self._crowded_s -= self._crowded_s / REMEMBERED_SAMPLES
            return
        cost_s = cost_s if cost_s > COSTLY_S else 0.0
        of_cpus_s = min(cost_s, self._without_cpu_s(time.monotonic())) if cost_s else 0.0
        self._for_calls.charge(cost_s - of_cpus_s)
        self._for_cpus.charge(of_cpus_s)
        self._crowded_s += (of_cpus_s - self._crowded_s) / REMEMBERED_SAMPLES
        was_patient, self._patient = self._patient, not (self._for_calls.due() and self._for_cpus.due())
        if self._patient is not was_patient:
            self.apply()

    def _without_cpu_s(self, now_s: float) -> float:
        """How long the observed thread had no CPU since the wait began; 0.0 where unknown."""
        worked_s = cpu_s(self._clock)
        return 0.0 if worked_s is None else max(now_s - self._began_s - (worked_s - self._observed_s), 0.0)

    def _suitable_s(self) -> float:
        if self._patient:
            return PATIENT_S
        return ALONE_S if threading.active_count() <= WITHOUT_OTHERS else OTHERS_S


class OtherThreads:
    """CPU time and lines of the job's other Python threads: only one thread runs Python at a time."""

    def __init__(self) -> None:
        self._polled_s = time.monotonic()
        self._ran_s: dict[int, float] = {}  # by the thread's number: all that it ran so far
        self._busy: dict[int, str] = {}
        self._cpu_s: Totals[str] = Totals()
        self._lines: dict[str, LineTimes] = {}

    def poll(self, training: int) -> None:
        """Read how long each has run, without the thread with the number ``training`` and ours."""
        now_s = time.monotonic()
        since_s, self._polled_s = now_s - self._polled_s, now_s
        before, self._ran_s, self._busy = self._ran_s, {}, {}
        for thread in threading.enumerate():
            number, called = thread.native_id or training, vars(thread)["_name"]  # a class may have a name of its own
            not_theirs = number == training or called.startswith("fulltilt-")
            all_s = None if not_theirs else cpu_s(cpu_clock(number))
            if all_s is None:
                continue
            self._ran_s[number] = all_s
            ran_s = all_s - before.get(number, all_s)
            if ran_s > BUSY_SHARE * since_s:
                name = common_name(called)
                self._busy[thread.ident or 0] = name
                if name in self._cpu_s or len(self._cpu_s) < MOST_NAMES:
                    self._cpu_s[name] += ran_s

    def sample(self) -> None:
        """Note the lines that the busy ones are at."""
        for thread, name in self._busy.items():
            stack = stack_of(thread)
            view = None if stack is None else view_of(stack)
            if view is not None and not view.waits and name in self._cpu_s:
                self._lines.setdefault(name, LineTimes()).add(view, 1.0)

    def record(self) -> tuple[ThreadRecord, ...]:
        """The costliest three, with their lines."""
        found = []
        for name in sorted(self._cpu_s, key=lambda name: -self._cpu_s[name])[:3]:
            lines = self._lines.get(name, LineTimes())
            seen = sum(lines.by_line().values())
            found.append(ThreadRecord(name, self._cpu_s[name], lines.top(3, self._cpu_s[name] / (seen or 1.0))))
        return tuple(found)


def common_name(name: str) -> str:
    """What threads of one kind have in common: ``Thread-3 (produce)`` is ``produce``."""
    target = re.fullmatch(r"Thread-\d+ \((.*)\)", name)
    return target[1] if target else re.sub(r"[-_]?\d+", "", name) or name


def cpu_times_s(thread: int) -> tuple[float, float] | None:
    """Seconds that a thread of this process ran, and waited for a CPU; None where unknown."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:  # noqa: PTH123 - hot
            ran, waited = file.read().split()[:2]
            return int(ran) * 1e-9, int(waited) * 1e-9
    except (OSError, ValueError):
        return None


def cpu_clock(thread: int) -> int:
    """The clock of the CPU time of a thread by its native number.

    Linux numbers these clocks so. Reading one takes no file and keeps the interpreter lock; asked through the C library
    (pthread_getcpuclockid), it would crash for a thread that has just ended.
    """
    return (~thread << 3) | CLOCK_OF_A_THREAD


def cpu_s(clock: int | None) -> float | None:
    """The time of a CPU clock; None where there is none, or its thread has ended."""
    try:
        return None if clock is None else time.clock_gettime(clock)
    except OSError:
        return None  # it has ended meanwhile


def wake_on_time() -> None:
    """Have the calling thread woken on time: by default Linux takes 50 µs more to save power."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
