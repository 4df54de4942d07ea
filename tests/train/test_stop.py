"""Signals that ask to stop while nothing is trained: the run can go on afterwards, and no request is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from fulltilt.train.stop import StopRequest

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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT"])
def test_a_signal_before_training_ends_it_as_one_that_can_go_on(name: str) -> None:
    said = f"fulltilt: received {name} before or after training; no step is lost\n"
    assert run(ENDED.format(name=name)) == (130 if name == "SIGINT" else 3, "", said)


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


def test_a_pool_of_the_users_can_end_its_workers_during_training() -> None:
    with StopRequest().listening():
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
        worker.start()
        worker.terminate()
        worker.join(5)
        ended = worker.exitcode
        worker.kill()
    assert ended == -signal.SIGTERM


def test_start_up_is_not_taken_for_a_step() -> None:
    now = 0.0
    stop = StopRequest(3600.0, clock=lambda: now)
    now = 1260.0  # building, filling a tier, compiling
    stop.step_done(5.0)
    assert stop.reason is None
