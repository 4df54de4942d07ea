"""A model's name: asked for once where the hub does not answer, and then told; what was fetched before still works."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import FileMetadataError
from transformers import AutoModelForSequenceClassification, AutoTokenizer, CLIPConfig, CLIPModel, XLMRobertaConfig

from fulltilt.errors import DataError, FulltiltError, UsageError
from fulltilt.recipes import find, options, pretrained
from fulltilt.recipes.pretrained import evaluated_weights
from fulltilt.recipes.visobert.trainer import keep_model
from fulltilt.train import checkpoint
from fulltilt.train.checkpoint_format import flatten_state

NAMED = {
    "cod": {"weights": "pretrained", "backbone": "test_resnet"},
    "carclip": {"model": "openai/clip-vit-base-patch32"},
    "visobert": {"model": "uitnlp/visobert"},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The questions to a hub that cannot be reached."""
    questions: list[str] = []

    def unreachable(url: str, **how: Any) -> None:
        questions.append(url)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return questions


@pytest.mark.parametrize("name", NAMED)
def test_a_hub_that_does_not_answer_is_asked_once_and_told_before_data_is_made(
    name: str, asked: list[str], tmp_path: Path
) -> None:
    """Seen to fail: the hub's library tries every file six times, which took 49 s."""
    recipe = find(name)
    request = options.read(recipe, {"data": str(tmp_path), "out": str(tmp_path / "out"), **NAMED[name]})
    with pytest.raises(UsageError, match="does not answer: Name or service not known"):
        recipe.check_options(request)
    assert len(asked) == 1


def test_what_was_fetched_before_is_used_without_the_hub(asked: list[str], tmp_path: Path) -> None:
    kept = tmp_path / "hub" / "models--uitnlp--visobert" / "snapshots" / "abc"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    assert pretrained.only_kept_files("uitnlp/visobert", "Give a folder.")
    assert not pretrained.only_kept_files(str(kept), "Give a folder."), "a folder needs no hub"
    assert len(asked) == 1


def test_an_answer_of_any_kind_is_left_to_the_hubs_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def strange(url: str, **how: Any) -> None:
        raise FileMetadataError("no commit")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", strange)
    assert not pretrained.only_kept_files("uitnlp/visobert", "Give a folder.")
    assert not pretrained.only_kept_files("no such/name", "Give a folder.")


class Payload:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.touched,)


@pytest.mark.parametrize("name", ["visobert", "carclip"])
def test_pickled_weights_are_refused_in_our_words(name: str, tmp_path: Path) -> None:
    """Seen to fail: torch's own text, with its advice to set weights_only=False, reached the user."""
    folder = tmp_path / "model"
    configs = {
        "visobert": XLMRobertaConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1),
        "carclip": CLIPConfig(),
    }
    configs[name].save_pretrained(folder)
    torch.save({"weight": Payload(tmp_path / "ran")}, folder / "pytorch_model.bin")
    loader = {"visobert": AutoModelForSequenceClassification, "carclip": CLIPModel}[name].from_pretrained
    with pytest.raises(DataError) as refused:
        pretrained.load("model", str(folder), loader, "Give another.")
    told = str(refused.value)
    assert "refused: it holds more than weights, and loading it could run code" in told
    assert "weights_only" not in told
    assert not (tmp_path / "ran").exists()
    assert refused.value.exit_code == 4


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"tokenizer.json": "{", "config.json": '{"model_type": "xlm-roberta"}'}, 4),
        ({"config.json": '{"auto_map": {"AutoTokenizer": ["own.Own", null]}, "model_type": "own"}'}, 4),
        ({"notes.txt": "mine"}, 2),
    ],
    ids=["damaged", "own code", "no tokenizer"],
)
def test_foreign_tokenizer_is_refused_in_one_sentence(files: dict[str, str], code: int, tmp_path: Path) -> None:
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    with pytest.raises(FulltiltError) as refused:
        pretrained.load("tokenizer", str(tmp_path), AutoTokenizer.from_pretrained, "Give another.")
    assert refused.value.exit_code == code
    assert len(str(refused.value).splitlines()) == 2
    assert "trust_remote_code" not in str(refused.value)


def test_a_model_is_exported_with_the_weights_it_was_evaluated_with(tmp_path: Path) -> None:
    checkpoint.claim(tmp_path)
    checkpoint.prepare(tmp_path / "checkpoints")
    weights, average = {"w": torch.zeros(2), "mean": torch.full((1,), 5.0)}, {"w": torch.ones(2)}
    values, tensors = flatten_state({"ema": average})
    written = checkpoint.write(tmp_path / "checkpoints", checkpoint.Snapshot(1, 1, None, weights, tensors, values))
    found = evaluated_weights(written.folder)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"w": [1.0, 1.0], "mean": [5.0]}


@pytest.mark.parametrize("damaged", [None, "step-00000001"])
def test_the_best_model_is_neither_one_of_nan_nor_missed_for_a_damaged_one(
    damaged: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.claim(tmp_path)
    checkpoint.prepare(root := tmp_path / "checkpoints")
    for step, metric in ((1, 0.5), (2, 0.4), (3, math.nan)):
        snapshot = checkpoint.Snapshot(step, 1, metric, {"w": torch.tensor([float(step)])}, {}, {})
        checkpoint.write(root, snapshot)
    if damaged:
        (root / damaged / "model.safetensors").write_bytes(b"x")
    exported: list[float] = []

    class Kept:
        def save_pretrained(self, folder: Path, state_dict: Any = None) -> None:
            exported.extend(tensor.item() for tensor in (state_dict or {}).values())

    request: Any = SimpleNamespace(
        out=tmp_path,
        settings=SimpleNamespace(monitor_mode="min"),
        options=SimpleNamespace(load_best_model_at_end=True),
    )
    keep_model(request, Kept(), Kept())
    assert exported == [2.0]
    assert "The best model is in" in capsys.readouterr().out
