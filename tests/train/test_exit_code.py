"""What a user reads of a run that goes wrong, where no fault of the catalogue is behind it."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest
import torch

from fulltilt import store
from fulltilt.errors import StoppedEarly
from fulltilt.records import RunRecord
from fulltilt.train import checkpoint
from fulltilt.train.config import TrainSettings
from fulltilt.train.data_source import BatchSource
from fulltilt.train.exit_code import exit_code_of
from fulltilt.train.job import Job
from fulltilt.train.loop import train
from fulltilt.train.progress import TrainingScreen


def test_a_path_that_may_not_be_looked_at_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(closed))

    monkeypatch.setattr(checkpoint, "folders", refuse)
    told = io.StringIO()
    assert exit_code_of(refuse, tmp_path / "out", told) == 7
    assert told.getvalue().splitlines() == [
        f"fulltilt: cannot use {closed}: Permission denied",
        "  Give another path, or permission to use it.",
    ]


def test_a_key_in_the_users_code_is_not_written_into_the_log(tmp_path: Path) -> None:
    out = store.OwnedFolder.claim(tmp_path / "out", "a training").path

    def body() -> None:
        raise RuntimeError("refused: api_key=sk-live-1234567890abcdef")

    assert exit_code_of(body, out, io.StringIO()) == 1
    log = out / "error.log"
    assert "refused: api_key=***" in log.read_text()
    assert "1234567890abcdef" not in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_for_anything_else_than_a_checkpoint_ends_with_7(number: int, tmp_path: Path) -> None:
    """Seen to fail: hdf5 writes its calibration before the checkpoint, and ended with 1 and Python's own words."""

    def write() -> None:
        raise OSError(number, os.strerror(number))  # a write, unlike an open, names no file

    told = io.StringIO()
    assert exit_code_of(write, tmp_path, told) == 7
    first, remedy = told.getvalue().splitlines()
    assert first.startswith(f"fulltilt: cannot write {tmp_path}: {os.strerror(number)} (")
    assert "Free some space" in remedy


@pytest.mark.parametrize(
    ("accumulation", "names"),
    [
        (1, ["batch 2 of epoch 1", "batch 3 of epoch 1", "batch 4 of epoch 1"]),
        (2, ["batches 2 to 3 of epoch 1", "batch 4 of epoch 1"]),
    ],
)
def test_batches_are_named_as_the_progress_bar_counts(accumulation: int, names: list[str]) -> None:
    steps = BatchSource([torch.zeros(2, 3)] * 4, accumulation, world_size=1).steps(epoch=0, consumed=1)
    assert [step.names() for step in steps] == names


def test_a_last_batch_of_one_sample_is_told_with_what_to_change(tmp_path: Path) -> None:
    """Seen to fail: torch's ValueError with code 1, after a whole epoch; then a record that still told that code."""
    data = torch.utils.data.TensorDataset(torch.zeros(5, 3, 1, 1))
    job = Job(
        model=torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3)),
        loss=lambda model, batch: model(batch[0]).sum(),
        data=data,
    )
    out, told = tmp_path / "out", io.StringIO()
    settings = TrainSettings(device="cpu", batch_size=2, epochs=1, workers=0)
    screen = TrainingScreen(out, speaks=False)
    assert exit_code_of(lambda: train(job, settings, out, screen=screen), out, told) == 2
    first, remedy, *_ = told.getvalue().splitlines()
    assert "has a single sample" in first
    assert "drop_last: true" in remedy
    assert store.read_record(out / store.RUN_FILE, RunRecord).exit_code == 2
    other = io.StringIO()
    assert exit_code_of(lambda: int("x"), tmp_path, other) == 1, "other ValueErrors are bugs"


def test_after_a_stop_no_checkpoint_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    checkpoint.claim(out)
    checkpoint.prepare(out / "checkpoints")
    snapshot = checkpoint.Snapshot(1, 1, None, {"w": torch.zeros(2)}, {}, {})
    written = checkpoint.write(out / "checkpoints", snapshot)
    hashed: list[Path] = []
    monkeypatch.setattr(checkpoint.checkpoint_format, "hash_file", hashed.append)

    def body() -> None:
        raise StoppedEarly("stopped", "Again.")

    told = io.StringIO()
    assert exit_code_of(body, out, told) == 3
    assert f"Newest checkpoint: {written.folder}" in told.getvalue()
    assert not hashed
