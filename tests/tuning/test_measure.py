"""What a trial sees of its loaders and saves: passes at once, loaders side by side, the last batch, checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fulltilt.tuning.trial.measure import Saves, TrainingLoaders


@dataclass
class Tap:
    loader_id: int
    trains: bool = False
    batches: int = 0


def test_a_loader_that_is_drawn_from_beside_the_one_that_trains_does_not_interrupt_it() -> None:
    """zip(labelled, unlabelled): backward() comes after a batch of the second; such a trial never measured anything."""
    labelled, unlabelled, validation = Tap(0), Tap(1, trains=True), Tap(2, batches=7)
    company = TrainingLoaders()
    for step in range(20):
        labelled.batches += 1
        unlabelled.batches += 1
        validation.batches += 5 if step % 10 == 9 else 0
        found = company.after_step([labelled, unlabelled, validation])
    assert found == [labelled, unlabelled]


def test_saves_go_to_the_scratch_folder_and_are_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    for home, name in (
        (torch, "save"),
        (torch, "load"),
        (safetensors.torch, "save_file"),
        (safetensors.torch, "save_model"),
        (PreTrainedTokenizerBase, "save_pretrained"),
        (PreTrainedModel, "save_pretrained"),
    ):
        monkeypatch.setattr(home, name, getattr(home, name))  # put back at the end
    monkeypatch.chdir(tmp_path)
    Path("model.pt").write_text("the user's")
    saves = Saves(str(tmp_path / "scratch"))
    saves.install()
    torch.save({"step": 1}, "model.pt")
    torch.save({"step": 2}, f=Path("deep/other.pt"))
    safetensors.torch.save_file({"weight": torch.zeros(1)}, "model.safetensors")
    assert torch.load("model.pt") == {"step": 1}
    assert torch.load("deep/other.pt") == {"step": 2}
    assert saves.count == 3
    assert Path("model.pt").read_text() == "the user's"
    assert sorted(os.listdir()) == ["model.pt", "scratch"]
