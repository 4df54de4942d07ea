"""What a trial sees of its loaders, side by side and evaluating, and of the checkpoints that a job saves."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from fulltilt.records import Settings
from fulltilt.tuning.trial.measure import Measuring, Saves
from fulltilt.tuning.trial.throughput import Assignment


def tap(loader_id: int, batches: int, eval_batches: int = 0) -> Any:
    counts = {"batches": batches, "eval_batches": eval_batches, "samples": 8 * batches, "counted": True}
    return SimpleNamespace(loader_id=loader_id, wait_s=0.5, described={"num_workers": 2}, **counts)


def test_loaders_side_by_side_train_and_only_evaluation_interrupts() -> None:
    """zip(labelled, unlabelled): backward() comes after a batch of the second; such a trial never measured anything."""
    taps = [tap(0, batches=20), tap(1, batches=20), tap(2, batches=10, eval_batches=10)]
    session: Any = SimpleNamespace(taps=SimpleNamespace(all=taps))
    seen = Measuring(session, torch, Assignment(Settings(), folder=""))._snapshot()
    assert (seen.batches, seen.samples, seen.wait_s, seen.workers) == (40, 320, 1.0, 4)
    assert seen.interruptions == 10


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
