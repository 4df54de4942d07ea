"""The hdf5 recipe as a user runs it: lines, config object, stop and resume, staging."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from safetensors.torch import load_file

from fulltilt.cli import main as command
from fulltilt.recipes import hdf5, options
from fulltilt.recipes.hdf5 import model, trainer
from fulltilt.recipes.synthetic import make_folder

# Whole trainings: in CI the cod recipe stands for all.
pytestmark = pytest.mark.slow

SMALL = ("--epochs", "2", "--batch-size", "24", "--width", "8", "--heads", "2", "--workers", "0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "hdf5"
    make_folder("hdf5", folder, 120, 0)
    return folder


def train(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        command.main(["train", "hdf5", *SMALL, *map(str, arguments)])
    return int(ended.value.code or 0)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(max((out / "checkpoints").glob("step-*")) / "model.safetensors")


@pytest.mark.slow
def test_a_stop_by_sigterm_changes_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--data", data, "--out", tmp_path / "whole", "--use-specaugment") == 0
    computed, calls = trainer.binary_loss, 0

    def interrupted(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:  # in the second epoch
            signal.raise_signal(signal.SIGTERM)
        return computed(*arguments)

    monkeypatch.setattr(trainer, "binary_loss", interrupted)
    again = ("--data", data, "--out", tmp_path / "stopped", "--use-specaugment")
    assert train(*again) == 3
    monkeypatch.undo()
    capsys.readouterr()
    assert train(*again) == 0
    assert "Resuming from" in capsys.readouterr().out
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_a_run_shows_and_leaves(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINER_LOG_LEVEL", "DEBUG")
    assert train("--data", data, "--out", tmp_path / "a", "--epochs", "1", "--residency", "none") == 0
    shown = capsys.readouterr().out
    for line in ("96 training windows from 3 files", "[TRAIN PROFILE] DataLoader avg:", "eval_auroc", "Epoch time:"):
        assert line in shown
    assert (tmp_path / "a" / "report.html").exists()
    quiet = ("--no-profile-performance", "--no-profile-gpu-util", "--imbalance", "focal")
    assert train("--data", data, "--out", tmp_path / "b", "--epochs", "1", *quiet) == 0
    shown = capsys.readouterr().out
    assert "[TRAIN PROFILE]" not in shown
    assert "| RAM:" not in shown


def test_the_config_object_has_the_guides_names_defaults_and_old_values() -> None:
    config = hdf5.Config()
    read = options.read(config.recipe(), {})
    settings = read.settings
    assert (settings.batch_size, settings.eval_batch_size, settings.workers, settings.prefetch) == (8192, 4096, 8, 16)
    assert (config.pin_memory, config.persistent_workers) == (True, True)
    assert (read.options.use_specaugment, read.options.stage_dir) == (False, None)
    assert (read.options.profile_performance, read.options.profile_gpu_util) == (True, True)
    config.batch_size, config.val_batch_size, config.num_workers, config.prefetch_factor = 5632, 2048, 4, 8
    settings = options.read(config.recipe(), {"epochs": 7}).settings
    assert (settings.batch_size, settings.eval_batch_size, settings.workers, settings.prefetch) == (5632, 2048, 4, 8)
    assert settings.epochs == 7
    with pytest.raises(AttributeError):
        config.batchsize = 1  # type: ignore[attr-defined]


def test_files_are_copied_to_stage_dir_only_when_it_pays(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = tmp_path / "ramdisk"
    stage.mkdir()
    once = ("--data", data, "--epochs", "1", "--stage-dir", stage)
    assert train(*once, "--out", tmp_path / "a") == 0
    assert "Not staged: " in capsys.readouterr().out


def test_a_mistake_ends_before_training_in_three_lines(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--data", data, "--out", tmp_path, "--features", "mfcc") == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert len(shown) <= 3
    assert "has no key 'mfcc'" in shown[0]


def test_several_keys_and_windows_of_a_long_recording_train(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "long.h5", "w") as file:
        file["a"] = torch.randn(300, 3).numpy()
        file["b"] = torch.randn(300, 2).double().numpy()
        file["labels"] = (torch.arange(300) // 10 % 2).numpy()
    arguments = ("--features", "a,b", "--window", "16", "--stride", "4", "--epochs", "1")
    assert train("--data", tmp_path, "--out", tmp_path / "out", *arguments) == 0


@pytest.mark.parametrize("imbalance", ["pos_weight", "focal", "none"])
def test_losses_are_finite_at_both_ends_and_focal_is_milder(imbalance: model.Imbalance) -> None:
    logits = torch.tensor([-80.0, 80.0, 0.0, 2.0], requires_grad=True)
    labels = torch.tensor([1, 1, 0, 0])
    loss = model.binary_loss(logits, labels, imbalance, 5.0, 2.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()
    plain = model.binary_loss(logits.detach(), labels, "none", 1.0, 0.0)
    assert {"pos_weight": loss > plain, "focal": loss < plain, "none": loss == plain}[imbalance]
