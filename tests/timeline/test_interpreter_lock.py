"""The observer gets the interpreter lock soon, and other threads of the script keep longer turns."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fulltilt.timeline.interpreter_lock import ALONE_S, IN_COMPANY_S, share_lock, wake_on_time

PR_GET_TIMERSLACK = 30


@pytest.fixture(autouse=True)
def _as_python_has_it() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.parametrize(("threads", "turn_s"), [(2, ALONE_S), (3, IN_COMPANY_S)])
def test_turns_are_longer_where_other_threads_share_the_lock(
    monkeypatch: pytest.MonkeyPatch, threads: int, turn_s: float
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    share_lock()
    assert sys.getswitchinterval() == pytest.approx(turn_s)


def test_turns_follow_threads_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, turn_s in ((2, ALONE_S), (5, IN_COMPANY_S), (1, ALONE_S)):
        monkeypatch.setattr(threading, "active_count", lambda threads=threads: threads)
        share_lock()
        assert sys.getswitchinterval() == pytest.approx(turn_s)


def test_shorter_turns_of_the_scripts_own_stay() -> None:
    sys.setswitchinterval(0.00001)
    share_lock()
    assert sys.getswitchinterval() == pytest.approx(0.00001)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no timer slack")
def test_only_the_observing_thread_is_woken_on_time() -> None:
    def slack_ns() -> int:
        return int(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))

    before_ns = slack_ns()
    with ThreadPoolExecutor(1) as observer:
        observer.submit(wake_on_time).result()
        assert observer.submit(slack_ns).result() == 1
    assert slack_ns() == before_ns > 1
