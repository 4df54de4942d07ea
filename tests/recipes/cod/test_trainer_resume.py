"""The cod recipe stopped and resumed: the same weights as without the stop; other sizes, stages and foreign weights."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fulltilt.cli import main as command
from fulltilt.recipes.cod import model as network
from fulltilt.recipes.cod import trainer
from fulltilt.recipes.synthetic import make_folder

SMALL = (
    *("--backbone", "test_resnet", "--img-size", "32", "--decoder-width", "16", "--num-experts", "2"),
    *("--epochs", "2", "--stage1-epochs", "1", "--batch-size", "4", "--stage2-batch-size", "3", "--workers", "0"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "cod"
    make_folder("cod", folder, 10, 0)
    return folder


def train(data: Path, out: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        command.main(["train", "cod", "--data", str(data), "--out", str(out), *SMALL, *arguments])
    return int(ended.value.code or 0)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(max((out / "checkpoints").glob("step-*")) / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nobody stopped."""
    out = tmp_path_factory.mktemp("whole")
    assert train(data, out) == 0
    return weights(out)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(1, id="in stage 1", marks=(pytest.mark.slow, pytest.mark.recipes)),
        pytest.param(4, id="in stage 2"),
    ],
)
@pytest.mark.slow
def test_a_stop_by_sigterm_changes_nothing(
    step: int,
    data: Path,
    whole: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    computed, calls = trainer.loss, 0

    def interrupted(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == step:
            signal.raise_signal(signal.SIGTERM)
        return computed(*arguments)

    monkeypatch.setattr(trainer, "loss", interrupted)
    assert train(data, tmp_path / "stopped") == 3
    assert calls == step
    assert not same(whole, weights(tmp_path / "stopped"))
    capsys.readouterr()
    assert train(data, tmp_path / "stopped") == 0
    assert "Resuming from" in capsys.readouterr().out
    assert same(whole, weights(tmp_path / "stopped"))


@pytest.mark.slow
def test_it_goes_on_with_another_image_size_and_says_so(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert train(data, out, "--max-steps", "2") == 0
    capsys.readouterr()
    assert train(data, out, "--max-steps", "3", "--img-size", "64") == 0
    shown = capsys.readouterr().out
    assert "img_size 32 → 64" in shown
    assert "step 2" in shown
    assert train(data, out, "--max-steps", "3", "--img-size", "64") == 0
    assert "Nothing is left to train: step 3 is done already" in capsys.readouterr().out


@pytest.mark.slow
def test_stage_2_begins_with_the_weights_of_another_trainer_or_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = network.build("test_resnet", 32, width=16, num_experts=2)
    torch.save({"model_state_dict": {f"module.{k}": v for k, v in first.state_dict().items()}}, tmp_path / "best.pth")
    foreign = ("--skip-stage1", "--resume-from", str(tmp_path / "best.pth"), "--max-steps", "1", "--lr", "1e-9")
    assert train(data, tmp_path / "a", *foreign, "--stage2-lr", "1e-9", "--min-lr", "0") == 0
    trained = weights(tmp_path / "a")
    parameters = dict(first.named_parameters())
    assert all(torch.allclose(trained[name], value, atol=1e-6) for name, value in parameters.items())
    shown = capsys.readouterr().out
    assert "tensors taken" in shown
    assert "Batch size: 3 (expected: 3)" in shown, "the batch of stage 2, which is the one asked for there"
    # A run's folder stands for its newest checkpoint; stage 2 begins at its own first step.
    assert train(data, tmp_path / "b", "--skip-stage1", "--resume-from", str(tmp_path / "a"), "--max-steps", "1") == 0
    assert [path.name for path in (tmp_path / "b" / "checkpoints").glob("step-*")] == ["step-00000001"]
