"""The visobert recipe as a user runs it: lines, stop and resume, what a CPU cannot do, and the model it leaves."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fulltilt
from fulltilt.cli import main as command
from fulltilt.diagnosis import answer
from fulltilt.diagnosis.rules import gpu
from fulltilt.feed.text import TextLoader
from fulltilt.recipes.synthetic import make_folder
from fulltilt.recipes.visobert import VisobertOptions
from fulltilt.recipes.visobert import data as texts_data
from fulltilt.recipes.visobert.trainer import ClassLoss, classification
from fulltilt.train import checkpoint

# Whole trainings: in CI the cod recipe stands for all.
pytestmark = pytest.mark.slow

SMALL = (
    *("--epochs", "2", "--batch-size", "8", "--accumulation", "2", "--vocab-size", "200", "--max-length", "16"),
    *("--hidden-size", "32", "--num-hidden-layers", "1"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "text"
    make_folder("text", folder, 75, 0)
    return folder


def train(*given: object) -> int:
    with pytest.raises(SystemExit) as ended:
        command.main(["train", "visobert", *SMALL, *map(str, given)])
    return int(ended.value.code or 0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def metrics_of(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open() as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stopped: 60 texts, 8 batches, 4 steps an epoch."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert train("--data", data, "--out", out) == 0
    return out


MICRO_BATCHES = [
    pytest.param(8, id="at the end of an epoch", marks=pytest.mark.slow),
    pytest.param(11, id="within one"),
]


@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
def test_stop_and_resume_give_the_weights_of_one_run(
    micro_batch: int, whole: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    computed, calls = ClassLoss.forward, 0

    def interrupted(self: ClassLoss, *given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == micro_batch:
            signal.raise_signal(signal.SIGTERM)
        return computed(self, *given)

    monkeypatch.setattr(ClassLoss, "forward", interrupted)
    assert train("--data", data, "--out", tmp_path) == 3
    assert f"step {-(-micro_batch // 2)} is saved" in capsys.readouterr().err
    monkeypatch.undo()
    assert train("--data", data, "--out", tmp_path) == 0
    assert "Resuming from" in capsys.readouterr().out
    assert same(weights(tmp_path / "model"), weights(whole / "model"))
    assert metrics_of(tmp_path) == metrics_of(whole)


def test_what_a_run_shows_and_leaves(whole: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "per_device_train_batch_size: 8\nfp16: true\ntf32: true\noptim: adamw_bnb_8bit\ngradient_checkpointing: true\n"
        "lr_scheduler_type: linear\nwarmup_ratio: 0.25\n"
    )
    assert train("--data", data, "--out", tmp_path / "out", "--config", config) == 0
    shown = capsys.readouterr().out
    parameters = sum(weight.numel() for weight in weights(tmp_path / "out" / "model").values())
    for line in (
        f"60 training and 15 validation texts, 3 classes; {parameters:,} parameters",
        "No GPU here: fp16 switched off",
        "No GPU here: 8-bit AdamW switched off",
        "Epoch 1/2 [█",
        "eval_macro_f1",
        "Epoch time: ",
        "Batch size: 8 (expected: 8)",
        "| RAM:",
    ):
        assert line in shown, shown
    for name in ("report.html", "run.json", "model/config.json", "model/tokenizer.json"):
        assert (tmp_path / "out" / name).exists(), name
    labels = json.loads((whole / "model" / "config.json").read_text())["id2label"]
    assert [*labels.values()] == ["negative", "neutral", "positive"]
    line = answer(fulltilt.load(whole)).checklist[0]
    assert (line.state, line.figure) == ("ok", "Batch size: 8 (expected: 8)")


@pytest.mark.slow
def test_best_weights_are_kept_when_asked_for(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("keep_last: 5\nload_best_model_at_end: true\n")
    assert train("--data", data, "--config", config, "--epochs", "5", "--out", tmp_path / "out") == 0
    saved = [checkpoint.verify(folder) for folder in checkpoint.folders(tmp_path / "out" / "checkpoints")]
    best = max((one.metric or 0.0, -one.step, one.folder) for one in saved)[-1]
    assert same(weights(tmp_path / "out" / "model"), weights(best))


@pytest.mark.slow
def test_resume_with_another_batch_size_goes_on(data: Path, tmp_path: Path, capsys: Any) -> None:
    assert train("--data", data, "--out", tmp_path, "--max-steps", "3") == 0
    assert train("--data", data, "--out", tmp_path, "--batch-size", "16") == 0
    assert "batch_size 8 → 16" in capsys.readouterr().out
    assert [row["epoch"] for row in metrics_of(tmp_path)] == ["1", "2"]
    newest = checkpoint.folders(tmp_path / "checkpoints")[0]
    assert newest.name == "step-00000006", "48 of 60 texts were used up: one more step in epoch 1, two in epoch 2"


def test_model_folder_for_other_classes(whole: Path, tmp_path: Path, capsys: Any) -> None:
    rows = "\n".join(f'{{"text": "phim {word} quá", "label": {n % 2}}}' for n, word in enumerate(["hay", "chán"] * 12))
    (tmp_path / "train.jsonl").write_text(rows)
    given = ("--model", whole / "model", "--residency", "none", "--epochs", "1", "--batch-size", "96")
    assert train("--data", tmp_path, "--out", tmp_path / "out", *given) == 0
    held_out = len(texts_data.read_texts(tmp_path, VisobertOptions(), 0).validation.texts)
    assert f"Batch size: {24 - held_out} (expected: 96)" in capsys.readouterr().out, "there are no more texts"
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert config["label2id"] == {"0": 0, "1": 1}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--optimizer", "adamw_8bit"), "did you mean adamw8bit?"),
        (("--model", "./no-such-folder"), "the model's folder ./no-such-folder does not exist"),
        (("--model", "."), "cannot be loaded"),
    ],
)
def test_mistake_ends_before_training_in_three_lines(
    given: tuple[str, ...], told: str, data: Path, tmp_path: Path, capsys: Any
) -> None:
    assert train("--data", data, "--out", tmp_path, *given) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert len(shown) <= 3, shown
    assert told in "\n".join(shown)


def test_advice_knows_the_names_of_our_texts() -> None:
    assert TextLoader.__name__ in gpu._OF_LIKE_LENGTH


def test_parts_of_a_batch_weigh_as_the_whole() -> None:
    loss = ClassLoss(torch.tensor([0.5, 2.0, 1.0]), 0.1)
    logits, labels = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 2, 0, 0])
    parts = (loss._measured(logits[:3], labels[:3]) + loss._measured(logits[3:], labels[3:])) / 2
    assert float(loss._measured(logits, labels)) == pytest.approx(float(parts))


def test_macro_f1_by_its_definition() -> None:
    predicted, true = torch.tensor([0, 0, 1, 1, 2, 0]), torch.tensor([0, 1, 1, 1, 0, 0])
    # class 0: 2 of 3 and 2 of 3; class 1: 2 of 2 and 2 of 3; class 2: 0 of 1 and none asked for; class 3 is not there
    found = classification(predicted, true, 4)
    assert found["macro_f1"] == pytest.approx((2 / 3 + 4 / 5 + 0) / 3)
    assert found["accuracy"] == pytest.approx(4 / 6)
