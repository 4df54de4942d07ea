"""A GPU that is slowed down, or that somebody else uses too, measures something else than the job."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from fulltilt.diagnosis import answer
from fulltilt.probes.gpu import Gpus
from fulltilt.records import HostReading, Run, Sample, Settings
from fulltilt.report import page, terminal
from fulltilt.report.answer import to_plain
from fulltilt.testing import FakeClock, FakeNvml, shared_gpu, throttled_gpu, two_t4s
from fulltilt.tuning.search_space import Attempt
from fulltilt.tuning.trial.outcome import trial_record
from fulltilt.tuning.trial.run_trial import Ended
from fulltilt.tuning.trial.throughput import Answer, StepBlock
from tests.diagnosis.examples import rank, run_of


def recorded(machine: Callable[[FakeClock], FakeNvml]) -> Run:
    """A run of 110 s on the first GPU of a fake machine, sampled once a second through the real probes."""
    clock = FakeClock()
    gpus = Gpus.open(machine(clock), environ={}, clock=clock)
    samples = []
    for second in range(110):
        clock.advance(1.0)
        samples.append(Sample(float(second), HostReading(cpu_pct=50.0), gpus.read()))
    uuid = samples[0].gpus[0].uuid
    return run_of(rank(device="cuda:0", gpu_uuid=uuid, pid=os.getpid()), samples=tuple(samples), compute=100.0)


TROUBLED = {
    "throttled": (throttled_gpu, "GPU 0 was slowed down in 100 % of the readings (thermal)"),
    "shared": (partial(shared_gpu, our_pid=os.getpid()), "GPU 0 was shared with process-4242 (pid 4242)"),
}


@pytest.mark.parametrize("trouble", TROUBLED)
def test_the_measurement_is_marked_invalid_wherever_it_is_shown(trouble: str, tmp_path: Path) -> None:
    """Seen to fail: with `_slowed_down` or `_shared` of diagnosis/evidence.py giving None a run is called valid."""
    machine, because = TROUBLED[trouble]
    run = recorded(machine)
    diagnosis = answer(run)
    assert diagnosis.invalid_because == because
    assert json.loads(json.dumps(to_plain(diagnosis, run)))["invalid_because"] == because
    screen = io.StringIO()
    terminal.show(Console(file=screen, width=120), [(run, diagnosis)])
    assert f"Not a valid measurement: {because}." in screen.getvalue()
    page.write(tmp_path / "report.html", [(run, diagnosis)])
    assert f"Not a valid measurement: {because}." in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("trouble", TROUBLED)
def test_the_tuner_drops_the_trial(trouble: str) -> None:
    """Seen to fail: with `_throttled` of tuning/trial/outcome.py returning None the trial is ok."""
    machine, because = TROUBLED[trouble]
    blocks = tuple(StepBlock(steps=10, samples=320, seconds=1.0, wait_s=0.1) for _ in range(8))
    measured = Answer(blocks, steps=80, losses=(1.0,) * 80, complete=True)
    ended = Ended(status=0, stopped_for=None, wall_s=10.0, tail="")
    trial = trial_record(Attempt(Settings(num_workers=4), "search"), ended, measured, recorded(machine), None)
    assert (trial.state, trial.note) == ("throttled", because)


def test_a_healthy_gpu_is_valid() -> None:
    run = recorded(two_t4s)
    assert answer(run).invalid_because is None


def test_a_run_without_a_gpu_is_valid() -> None:
    assert answer(run_of(rank(), compute=100.0)).invalid_because is None
