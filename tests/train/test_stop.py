"""Signals that ask to stop while nothing is trained: the run can go on afterwards, and no request is lost."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt.train import exit_code_of
from fulltilt.train.stop import StopRequest, signals_end_it, was_interrupted

ENDED = """
import os, signal, time
from fulltilt.train.stop import signals_end_it
with signals_end_it():
    try:
        os.kill(os.getpid(), signal.{name})
        time.sleep(20)
    finally:
        print("goes on")
"""


def run(script: str, **more: str) -> tuple[int, str, str]:
    environment = {**os.environ, **more}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_before_training_ends_it_as_one_that_can_go_on(name: str) -> None:
    said = f"fulltilt: received {name} before or after training; no step is lost\n"
    assert run(ENDED.format(name=name)) == (3, "", said)


def test_a_rank_is_ended_as_its_launcher_means_it() -> None:
    assert run(ENDED.format(name="SIGTERM"), TORCHELASTIC_RUN_ID="1")[0] == -signal.SIGTERM


FORKED = """
import os, signal, time
from fulltilt.train.stop import signals_end_it
with signals_end_it():
    child = os.fork()
    if not child:
        time.sleep(20)
    time.sleep(0.3)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_that_was_forked_is_ended_by_the_signal_itself() -> None:
    assert run(FORKED) == (0, f"{-signal.SIGTERM}\n", "")


def swallow_an_interrupt() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return
    raise AssertionError("Ctrl-C is to be raised")


def test_an_interrupt_that_somebody_caught_stops_the_loop_at_its_first_step() -> None:
    with signals_end_it():
        swallow_an_interrupt()
        assert StopRequest().reason == "received SIGINT"
    assert StopRequest().reason is None


def test_what_fails_after_an_interrupt_that_somebody_caught_was_interrupted(tmp_path: Path) -> None:
    def half_imported() -> None:
        swallow_an_interrupt()
        raise RecursionError

    told = io.StringIO()
    with signals_end_it():
        assert exit_code_of(half_imported, tmp_path, told) == 130
    assert told.getvalue() == "fulltilt: interrupted before or after training; no step is lost\n"
    assert not was_interrupted()
