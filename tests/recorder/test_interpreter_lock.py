"""The observer gets the interpreter lock soon, and other threads of the script keep longer turns."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fulltilt.recorder.interpreter_lock import (
    ALONE_S,
    CROWDED_SHARE,
    LONGEST_EVERY_S,
    OTHERS_S,
    PATIENT_S,
    OtherThreads,
    SwitchInterval,
    common_name,
    cpu_clock,
    wake_on_time,
)

PR_GET_TIMERSLACK = 30


@pytest.fixture(autouse=True)
def _as_python_has_it() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.parametrize(("threads", "turn_s"), [(1, ALONE_S), (2, OTHERS_S)])
def test_turns_are_longer_where_other_threads_share_the_lock(
    monkeypatch: pytest.MonkeyPatch, threads: int, turn_s: float
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    SwitchInterval().apply()
    assert sys.getswitchinterval() == pytest.approx(turn_s)


def test_turns_follow_threads_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = SwitchInterval()
    for threads, turn_s in ((1, ALONE_S), (5, OTHERS_S), (1, ALONE_S)):
        monkeypatch.setattr(threading, "active_count", lambda threads=threads: threads)
        turns.apply()
        assert sys.getswitchinterval() == pytest.approx(turn_s)


def test_shorter_turns_of_the_scripts_own_stay() -> None:
    sys.setswitchinterval(0.00001)
    SwitchInterval().apply()
    assert sys.getswitchinterval() == pytest.approx(0.00001)


def test_the_scripts_own_turns_are_back_in_the_end() -> None:
    turns = SwitchInterval()
    turns.apply()
    turns.restore()
    assert sys.getswitchinterval() == pytest.approx(0.005)
    turns.apply()
    sys.setswitchinterval(0.02)
    turns.restore()
    assert sys.getswitchinterval() == pytest.approx(0.02), "set by the script since"


def test_a_forked_process_takes_over_what_its_parent_put_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    SwitchInterval().apply()
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    SwitchInterval().apply()
    assert sys.getswitchinterval() == pytest.approx(OTHERS_S)


class Waits:
    """Waits of an observing thread on a clock of their own: each takes so long, costs so much, and lets the observed
    thread work for so long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.cost_s = self.observed_s = 0.0
        monkeypatch.setattr(threading, "active_count", lambda: 1)
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "thread_time", lambda: self.cost_s)
        monkeypatch.setattr(time, "clock_gettime", lambda _clock: self.observed_s)
        self.turns = SwitchInterval()
        self.turns.apply()

    def wait(self, took_s: float, cost_s: float, observed_s: float) -> None:
        self.turns.begin_wait(0)
        self.now_s += took_s
        self.cost_s += cost_s
        self.observed_s += observed_s
        self.turns.end_wait()

    @property
    def patient(self) -> bool:
        return sys.getswitchinterval() == pytest.approx(PATIENT_S)


@pytest.mark.parametrize(
    ("cost_s", "patient_s"),
    [(0.04, 0.0), (0.07, 2.0), (0.3, 25.0)],
    ids=["once and short", "once and long", "once and very long"],
)
def test_turns_are_long_until_a_costly_wait_is_paid_for(
    monkeypatch: pytest.MonkeyPatch, cost_s: float, patient_s: float
) -> None:
    waits, long_s = Waits(monkeypatch), 0.0
    for sample in range(1000):
        waits.wait(0.1, 0.00002 if sample else cost_s, observed_s=0.1)
        long_s += 0.1 * waits.patient
    assert long_s == pytest.approx(patient_s, abs=0.5)
    assert sys.getswitchinterval() == pytest.approx(ALONE_S)


def test_samples_become_fewer_and_not_later_where_the_observed_thread_has_no_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = Waits(monkeypatch)
    assert waits.turns.every_s(0.005) == 0.005
    for _ in range(1000):
        every_s = waits.turns.every_s(0.01)
        waits.wait(every_s, 0.0003, observed_s=every_s - 0.002)
        assert not waits.patient
    assert every_s == pytest.approx(0.0003 / CROWDED_SHARE, rel=0.01)
    for _ in range(1000):
        waits.wait(waits.turns.every_s(0.01), 0.00002, observed_s=0.01)
    assert waits.turns.every_s(0.01) == 0.01


def test_a_thread_that_waits_and_then_keeps_the_lock_does_not_cost_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, long = Waits(monkeypatch), 0
    for _ in range(1000):
        every_s = waits.turns.every_s(0.01)
        waits.wait(every_s, 0.00005 if waits.patient else 0.004, observed_s=every_s / 2)
        long += waits.patient
    assert every_s <= LONGEST_EVERY_S
    assert waits.cost_s < 0.025 * waits.now_s + 0.05
    assert long > 300


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no clock for a thread")
def test_the_clock_of_a_thread_that_has_ended_tells_nothing() -> None:
    with ThreadPoolExecutor(1) as ended:
        clock = cpu_clock(ended.submit(threading.get_native_id).result())
    assert clock is not None
    turns = SwitchInterval()
    for observed in (clock, None, cpu_clock(threading.get_native_id())):
        turns.begin_wait(observed)
        turns.end_wait()
    assert turns.every_s(0.01) == 0.01


def test_waiting_for_a_call_that_keeps_the_lock_takes_little_of_the_cpu() -> None:
    """``sorted`` never gives the lock up, so that whoever waits for it asks in vain after every turn: for a second."""
    strings = [str(number * 7919 % 1000003) for number in range(200_000)]
    worked_s: list[float] = []
    done = threading.Event()

    clock = cpu_clock(threading.get_native_id())

    def observe() -> None:
        turns = SwitchInterval()
        turns.apply()
        while not done.is_set():
            turns.begin_wait(clock)
            time.sleep(0.005)
            turns.end_wait()
        worked_s.append(time.thread_time())

    observer = threading.Thread(target=observe)
    observer.start()
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < 1.5:
        sorted(strings)
    done.set()
    observer.join()
    assert worked_s[0] < 0.2


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no timer slack")
def test_only_the_observing_thread_is_woken_on_time() -> None:
    def slack_ns() -> int:
        return int(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))

    before_ns = slack_ns()
    with ThreadPoolExecutor(1) as observer:
        observer.submit(wake_on_time).result()
        assert observer.submit(slack_ns).result() == 1
    assert slack_ns() == before_ns > 1


# --------------------------------------------------------------------------- other threads


def spin(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


def test_other_threads_are_timed_and_their_lines_named() -> None:
    stop = threading.Event()
    started = [threading.Thread(target=spin, args=(stop,)), threading.Thread(target=stop.wait, name="idle")]
    for thread in started:
        thread.start()
    others = OtherThreads()
    began_s = time.monotonic()
    try:
        while time.monotonic() - began_s < 1.0:
            others.poll(threading.get_native_id())
            time.sleep(0.05)
            others.sample()
    finally:
        stop.set()
        for thread in started:
            thread.join()
    (only,) = others.record()
    assert only.name == "spin"
    assert 0.2 < only.cpu_s < 1.1
    assert {line.where.rpartition("/")[2].partition(":")[0] for line in only.lines} == {"test_interpreter_lock.py"}
    assert sum(line.seconds for line in only.lines) == pytest.approx(only.cpu_s)


def test_neither_the_training_thread_nor_ours_is_another() -> None:
    stop = threading.Event()
    ours = threading.Thread(target=spin, args=(stop,), name="fulltilt-observer")
    ours.start()
    others = OtherThreads()
    try:
        for _ in range(5):
            others.poll(threading.get_native_id())
            time.sleep(0.05)
    finally:
        stop.set()
        ours.join()
    assert others.record() == ()


@pytest.mark.parametrize(
    ("name", "common"),
    [("Thread-12 (fill)", "fill"), ("ThreadPoolExecutor-0_3", "ThreadPoolExecutor"), ("loader", "loader"), ("7", "7")],
)
def test_threads_of_one_kind_have_one_name(name: str, common: str) -> None:
    assert common_name(name) == common
