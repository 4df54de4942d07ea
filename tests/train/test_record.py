"""Every training is a run of Fulltilt too: what its folder holds after an end, a stop, a crash, a kill and a resume."""

from __future__ import annotations

import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fulltilt import store
from fulltilt.diagnosis import answer
from fulltilt.errors import RunFolderError, StoppedEarly
from fulltilt.recorder import attach
from fulltilt.recorder.session import Session
from fulltilt.records import Run, Span
from fulltilt.train.config import TrainSettings
from fulltilt.train.loop import train
from fulltilt.train.progress import TrainingScreen
from fulltilt.train.train_state import StepEnd
from tests.faults import victim


def run(out: Path, *, on_step: Any = None, changes: dict[str, Any] | None = None, **settings: Any) -> str:
    stream = io.StringIO()
    screen = TrainingScreen(out, stream=stream, sampled=False)
    chosen = TrainSettings(**{**victim.DEFAULTS, "record": True, **settings})
    train(victim.make_job(**(changes or {})), chosen, out, screen=screen, on_step=on_step)
    return stream.getvalue()


# Three epochs take longer than what is too short to be judged.
SAMPLE_S = 0.015


class SlowSamples(victim.NoisySamples):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SAMPLE_S)
        return super().__getitem__(index)


def test_the_folder_of_a_training_is_a_run_folder_whose_ledger_closes(tmp_path: Path) -> None:
    told = run(tmp_path, changes={"data": SlowSamples(), "name": "slow samples"}, epochs=3, save_every=4)
    for name in ("run.json", "rank-0.json", "steps.jsonl", "samples.jsonl", "findings.json", "report.html"):
        assert (tmp_path / name).stat().st_size, name
    recorded = store.load(tmp_path)
    assert (recorded.run.name, recorded.run.state, recorded.run.exit_code) == ("slow samples", "done", 0)
    diagnosis = answer(recorded)
    ledger = diagnosis.ledger
    assert ledger.buckets.total_s == pytest.approx(ledger.wall_s, rel=1e-6)
    assert ledger.buckets.unattributed_s < 0.03 * ledger.wall_s
    for bucket in ("data_wait_s", "compute_s", "validation_s", "checkpoint_s"):
        assert getattr(ledger.buckets, bucket) > 0.0, bucket
    assert ledger.buckets.data_wait_s > (3 * 44 - 8) * SAMPLE_S * 0.95  # the first batch belongs to the start-up
    assert (diagnosis.throughput.steps, diagnosis.throughput.samples) == (18, 3 * 44)
    assert diagnosis.findings[0].code == "input_serial"
    assert f"report: {tmp_path / 'report.html'}" in told


def test_recording_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    plain = victim.run_here(tmp_path / "plain")
    assert victim.run_here(tmp_path / "recorded", record=True) == plain


def test_every_attempt_keeps_its_record(tmp_path: Path) -> None:
    """Stopped, crashed, ended: the latest is in the folder itself, those before it beside it, the oldest first."""

    def stop(end: StepEnd) -> None:
        if end.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    def crash(end: StepEnd) -> None:
        if end.step == 8:
            raise ZeroDivisionError

    with pytest.raises(StoppedEarly):
        run(tmp_path, on_step=stop)
    assert recorded(tmp_path) == ("interrupted", 3, 3)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, on_step=crash)
    assert recorded(tmp_path) == ("crashed", 1, 5)
    run(tmp_path)
    assert recorded(tmp_path) == ("done", 0, 6)
    assert recorded(tmp_path / "before-1") == ("interrupted", 3, 3)
    assert recorded(tmp_path / "before-2") == ("crashed", 1, 5)
    before = (tmp_path / "run.json").read_bytes()
    run(tmp_path)  # nothing is left to train: the record of the training stays where it is
    assert (tmp_path / "run.json").read_bytes() == before


def recorded(folder: Path) -> tuple[str, int | None, int]:
    found: Run = store.load(folder)
    assert (folder / "report.html").exists()
    return found.run.state, found.run.exit_code, sum(rank.steps for rank in found.ranks)


def test_an_attempt_that_was_killed_is_called_so_by_the_next_one(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    text = (tmp_path / "run.json").read_text()
    store.write_text(
        tmp_path / "run.json", text.replace('"state": "done"', '"state": "running"')
    )  # as a kill leaves it
    run(tmp_path)
    assert store.load(tmp_path / "before-1").run.state == "killed"


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    run(tmp_path, record=False, epochs=1)
    assert not (tmp_path / "run.json").exists()


def test_a_training_under_fulltilt_run_is_not_recorded_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_folder(tmp_path / "attached")
    session = Session(torch, tmp_path / "attached", time.perf_counter_ns())
    monkeypatch.setattr(attach, "current", session)
    session.begin_here()
    try:
        run(tmp_path / "out", epochs=1)
    finally:
        session.finish()
    assert not (tmp_path / "out" / "run.json").exists()
    spans = list(store.read_lines(tmp_path / "attached" / "steps.jsonl", Span))
    assert sum(span.steps for span in spans) == 6
    assert sum(span.buckets.checkpoint_s for span in spans) > 0.0, "the engine's own marks arrive there"


def test_a_disk_that_refuses_the_record_does_not_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RunFolderError("cannot write run.json: No space left on device")

    monkeypatch.setattr(store, "write_json", full)
    told = run(tmp_path, epochs=1)
    assert told.count("warning: this run is not recorded: cannot write run.json") == 1
    assert "Epoch 1/1" in told


def test_ready_batches_are_measured_too(tmp_path: Path) -> None:
    inputs = victim.NoisySamples().inputs

    class Batches:
        def __iter__(self) -> Any:
            for first in range(0, 44, 4):
                time.sleep(0.01)
                yield inputs[first : first + 4], inputs[first : first + 4].sum(1) > 0

        def __len__(self) -> int:
            return 11

    run(tmp_path, changes={"data": Batches(), "eval_data": None}, accumulation=2, monitor=None, monitor_mode="max")
    recorded = store.load(tmp_path)
    found = answer(recorded)
    assert recorded.ranks[0].loaders[0].dataset_len is None  # eleven is the number of batches
    assert (found.throughput.steps, found.throughput.samples) == (12, 88)
    assert found.ledger.buckets.data_wait_s > 2 * 11 * 0.01 * 0.9
