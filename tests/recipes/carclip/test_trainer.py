"""The recipe as a user runs it: what it says, parts that change nothing, a model that others can load, resume."""

from __future__ import annotations

import os
import re
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fulltilt.cli.train import run_recipe
from fulltilt.errors import UsageError
from fulltilt.recipes.carclip import RECIPE, trainer
from fulltilt.recipes.carclip.model import TOKENIZER, fixed_length, tokenised
from fulltilt.recipes.carclip.trainer import contrastive_loss
from fulltilt.recipes.pretrained import own_tokenizer, trained_tokenizer
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.synthetic import make_folder
from fulltilt.train.config import TrainSettings

GUIDE = Path(__file__).parents[3] / "guides" / "scripts" / "train_car_clip.py"


@pytest.fixture(scope="module")
def cars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "cars"
    make_folder("cars", folder, 60, 0)
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Sums in the same order in every run, and no more threads than a test beside us leaves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(cars: Path, out: Path, **given: Any) -> int:
    small = {"image_size": 32, "batch_size": 8, "workers": 0, "lr": 1e-3, "device": "cpu", "epochs": 1}
    return run_recipe(RECIPE, {"data": str(cars), "out": str(out), **small, **given})


def weights(out: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(out / "model" / "model.safetensors")
    return loaded


def assert_trained_alike(one: Path, other: Path) -> None:
    for (name, ours), theirs in zip(weights(one).items(), weights(other).values(), strict=True):
        if name.endswith("k_proj.bias"):
            continue  # attention does not depend on it: its gradient is rounding, which Adam blows up to a whole step
        # Adam does the same to single numbers of an embedding.
        beyond = ~torch.isclose(ours, theirs, rtol=1e-4, atol=1e-5)
        assert beyond.float().mean() < 1e-4, name


@pytest.mark.slow
def test_a_run_in_parts_prints_the_guides_lines_and_leaves_a_model(
    cars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cars, tmp_path / "a", accumulation=2, max_steps=2) == 0
    shown = capsys.readouterr().out
    assert "Batch size: 8 (expected: 8)" in shown
    assert re.search(r"Epoch time: \d+s \([\d.]+ samples/sec, [\d.]+ batches/sec\)", shown)
    assert "A step compares 16 pictures with 16 captions, in 2 parts of 8" in shown
    for metric in ("i2t_recall_at_1", "t2i_recall_at_10"):
        assert f"eval_{metric} " in shown
    # The same steps in one part train the same; the model that is left is one that the recipe takes.
    assert run(cars, tmp_path / "b", batch_size=16, max_steps=2) == 0
    assert_trained_alike(tmp_path / "a", tmp_path / "b")
    assert run(cars, tmp_path / "c", model=str(tmp_path / "a" / "model"), image_size=None, max_steps=1, lr=1e-9) == 0
    shown = capsys.readouterr().out
    assert "pretrained" in shown
    for name, value in weights(tmp_path / "c").items():
        torch.testing.assert_close(value, weights(tmp_path / "a")[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_with_the_same_weights(
    cars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(cars, tmp_path / "whole", accumulation=2) == 0
    calls = 0

    def stopped(model: Any, parts: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return contrastive_loss(model, parts)

    monkeypatch.setattr(trainer, "contrastive_loss", stopped)
    assert run(cars, tmp_path / "cut", accumulation=2) == 3
    assert not (tmp_path / "cut" / "model").exists()
    assert run(cars, tmp_path / "cut", accumulation=2) == 0
    assert calls == 3, "two steps before, one after"
    for name, value in weights(tmp_path / "cut").items():
        assert torch.equal(value, weights(tmp_path / "whole")[name]), name


@pytest.mark.slow
def test_memory_that_runs_out_halves_the_parts_and_changes_nothing(
    cars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tight(model: Any, parts: Any) -> Any:
        if max(len(part["car"]) for part in parts) > 4:
            raise torch.OutOfMemoryError("pretended")
        return contrastive_loss(model, parts)

    assert run(cars, tmp_path / "roomy", max_steps=2) == 0
    monkeypatch.setattr(trainer, "contrastive_loss", tight)
    assert run(cars, tmp_path / "tight", max_steps=2) == 0
    assert "going on with micro-batches of 4 (the effective batch stays 8)" in capsys.readouterr().out
    assert_trained_alike(tmp_path / "tight", tmp_path / "roomy")


def test_frozen_towers_and_temperature_stay(cars: Path, tmp_path: Path) -> None:
    assert run(cars, tmp_path / "start", max_steps=1, lr=1e-12) == 0
    assert run(cars, tmp_path / "run", max_steps=2, freeze="image", learn_temperature=False) == 0
    start, end = weights(tmp_path / "start"), weights(tmp_path / "run")
    moved = {name for name in end if (end[name] - start[name]).abs().max() > 1e-6}
    assert not any(name.startswith("vision_model.") or name == "logit_scale" for name in moved)
    assert {"visual_projection.weight", "text_projection.weight"} <= moved


def test_the_same_captions_give_the_same_tokenizer(tmp_path: Path) -> None:
    captions = [f"a {colour} car of {year}" for colour in ("red", "blue", "green") for year in range(1990, 2020)]
    one, two = (trained_tokenizer(given, **TOKENIZER) for given in (captions, captions[::-1]))
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()
    begun = Request(None, TrainSettings(), tmp_path, tmp_path / "out")
    kept = own_tokenizer(begun, captions, **TOKENIZER)
    goes_on = Request(None, TrainSettings(), tmp_path, tmp_path / "new", resume_from=tmp_path / "out")
    again = own_tokenizer(goes_on, ["other captions"], **TOKENIZER)
    assert again.get_vocab() == kept.get_vocab() == one.get_vocab(), "a run that goes on reads as it did"
    length = fixed_length(one, captions, 77)
    found = tokenised(one, ["a red car of 2001", "ein völlig fremdes 車" * 20], length)
    assert found.shape == (2, length)
    assert (found[:, 0] == 0).all()
    assert found[1, -1] == 1, "cut short, but not by its end token"


def test_a_model_of_another_kind_is_told(cars: Path, tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    options = RECIPE.options(model=str(tmp_path / "bert"))
    with pytest.raises(UsageError, match="of type 'bert', not clip"):
        trainer.load_model(Request(options, TrainSettings(), cars, tmp_path / "out"), ["a car"])


def test_the_guides_flags_are_the_recipes() -> None:
    guide = runpy.run_path(str(GUIDE))
    given = "--batch_size 128 --gradient_accumulation 2 --num_workers 12 --epochs 20 --lr 2e-5 --no_mixed_precision"
    ours = " ".join(guide["translated"](given.split()))
    assert ours == "--batch-size 128 --accumulation 2 --workers 12 --epochs 20 --lr 2e-5 --precision=fp32"
    assert guide["batch_line"](given.split(), 128) == "Using batch size: 128 (from command line)"
    assert guide["batch_line"](["--batch_size=64", "--lr=1"], 64) == "Using batch size: 64 (from command line)"
    assert guide["batch_line"]([], 96) == "Using batch size: 96 (default)"
    assert guide["batch_line"](["--config=car.yaml"], 96) is None  # the file may set it, and the training says it
