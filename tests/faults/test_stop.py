"""Signals and the time limit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from fulltilt.train import exit_code_of
from fulltilt.train.checkpoint import newest_complete
from fulltilt.train.stop import BEGAN, StopRequest, limits_count_from_here
from fulltilt.train.train_state import StepEnd
from tests.faults import ranks, victim
from tests.faults.victim import Order

LONG = {"epochs": 4000, "save_every": 200}


def signal_at_step_5(end: StepEnd) -> None:
    if end.step == 5:
        os.kill(os.getpid(), SENT)


SENT = signal.SIGTERM


def choose_signal(order: Order) -> None:
    global SENT
    SENT = order.note
    signal.signal(SENT, signal.SIG_DFL)  # a suite that runs under nohup hands an ignored SIGHUP down


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_saves_at_the_next_step_and_exits_3(number: signal.Signals, tmp_path: Path) -> None:
    """Seen to fail: without the handlers of `StopRequest.listening` the process dies of the signal."""
    order = Order(tmp_path, {"save_every": 200}, prepare=choose_signal, on_step=signal_at_step_5, note=number)
    assert victim.exit_code(order) == 3
    assert max(victim.chain(tmp_path)) <= 6
    found = newest_complete(tmp_path / "checkpoints").checkpoint
    assert found is not None
    assert found.step == max(victim.chain(tmp_path))
    assert f"stopped: received {number.name}" in victim.told(tmp_path)
    assert victim.exit_code(Order(tmp_path, {"save_every": 200})) == 0
    whole = victim.run_here(tmp_path / "whole", save_every=200)
    assert victim.chain(tmp_path) == whole


def test_nohup_is_heeded() -> None:
    """Seen to fail: the handler took the place of the SIG_IGN that nohup had set, and closing the terminal stopped."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert stop.reason is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_rank_stops_when_its_launcher_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: ranks of a killed torchrun trained on, held their GPUs, and kept the folder."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    stop = StopRequest()
    stop.step_done(0.0)
    assert stop.reason is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    stop.step_done(0.0)
    assert stop.reason == "the launcher is gone"


def interrupt_twice(end: StepEnd) -> None:
    if end.step == 5:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    """Seen to fail: without the `raise KeyboardInterrupt` of the handler the run saves and exits 3."""
    began = time.monotonic()
    assert victim.exit_code(Order(tmp_path, LONG, on_step=interrupt_twice)) == 130
    assert time.monotonic() - began < 90
    assert "a second time" in victim.told(tmp_path)


def terminate_at_random(out: Path, settings: dict[str, object], chance: random.Random, world: int) -> list[int | None]:
    """With several ranks the launcher tells all of them, or Slurm one."""
    chains = [out / f"chain.{rank}.txt" for rank in range(world)]
    before = [chain.stat().st_size if chain.exists() else 0 for chain in chains]
    children = ranks.start(out, world, settings=settings) if world > 1 else [victim.start(Order(out, settings))]
    # Before the first step there is nothing to save, and in the first moments no handler yet.
    for child, chain, size in zip(children, chains, before, strict=True):
        while child.is_alive() and not (chain.exists() and chain.stat().st_size > size):
            time.sleep(0.005)
    time.sleep(chance.random() * 0.5)
    for child in children if chance.random() < 0.5 else [chance.choice(children)]:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGTERM)
    for child in children:
        child.join(90)
    return [child.exitcode for child in children]


def check_termination(out: Path, times: int, seed: int, world: int = 1) -> None:
    chance = random.Random(seed)
    settings: dict[str, object] = {**LONG, "workers": world if seed % 2 else 0}
    for _ in range(times):
        assert terminate_at_random(out, settings, chance, world) == [3] * world, victim.told(out)
        found = newest_complete(out / "checkpoints")
        assert found.checkpoint is not None
        assert not found.warnings
        assert {max(victim.chain(out, rank)) for rank in range(world)} == {found.checkpoint.step}


def test_sigterm_at_random_moments(tmp_path: Path) -> None:
    check_termination(tmp_path, 3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_sigterm_a_hundred_times(seed: int, world: int, tmp_path: Path) -> None:
    check_termination(tmp_path, 10, seed, world)


class SlowSamples(victim.NoisySamples):
    def __getitem__(self, index: int) -> object:  # type: ignore[override]
        time.sleep(0.01)
        return super().__getitem__(index)


def slow_down(order: Order) -> dict[str, object]:
    return {"data": SlowSamples()}


def test_time_limit(tmp_path: Path) -> None:
    """Seen to fail: without the time check in `StopRequest.step_done` the run goes on to its last step."""
    began = time.monotonic()
    settings = {"epochs": 200, "save_every": 10, "max_time_s": 3.0}
    assert victim.exit_code(Order(tmp_path, settings, prepare=slow_down)) == 3
    # The child's start is not the run's; what counts is that the run itself ended in time.
    assert time.monotonic() - began < 3.0 + 90
    assert "the time limit of 3 s is near" in victim.told(tmp_path)
    found = newest_complete(tmp_path / "checkpoints").checkpoint
    assert found is not None
    assert found.step == max(victim.chain(tmp_path))


def test_the_limit_is_that_of_the_whole_command() -> None:
    """Seen to fail: `--max-time 10s` took 18 s, because imports and the making of data were not counted."""
    with limits_count_from_here():
        began = float(os.environ[BEGAN])
        with limits_count_from_here():  # a rank, started later
            assert float(os.environ[BEGAN]) == began
        assert not StopRequest(100.0, clock=lambda: began + 99).wanted(0.0)
        assert StopRequest(100.0, clock=lambda: began + 101).wanted(0.0)
    assert not StopRequest(100.0, clock=lambda: began + 101).wanted(0.0), "in a notebook it counts from the call"


def test_an_interrupt_before_training_is_not_called_the_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert exit_code_of(interrupted, tmp_path) == 130
    assert "before or after training; no step is lost" in capsys.readouterr().err


def test_the_time_for_a_save_is_kept_in_reserve() -> None:
    now = 0.0
    stop = StopRequest(100.0, clock=lambda: now)
    for now in range(1, 200):  # noqa: B007 - read by the clock
        stop.step_done(longest_save_s=20.0)
        if stop.reason:
            break
    assert now == 68  # 100 s less 1.5 saves of 20 s less two steps of 1 s


def test_the_time_limit_holds_between_steps_too() -> None:
    now = 0.0
    stop = StopRequest(100.0, clock=lambda: now)
    now = 60.0
    assert not stop.wanted(longest_save_s=20.0)
    now = 70.0
    assert stop.wanted(longest_save_s=20.0)


def test_evaluation_and_saves_are_not_taken_for_steps() -> None:
    now = 0.0
    stop = StopRequest(100.0, clock=lambda: now)
    now = 1.0
    stop.step_done(0.0)
    now = 50.0
    stop.pause_done()
    now = 51.0
    stop.step_done(0.0)
    assert stop.reason is None
