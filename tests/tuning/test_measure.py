"""What a trial sees of its loaders and saves: passes at once, loaders side by side, the last batch, checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.utils.data import DataLoader

from fulltilt.tuning.space import Space
from fulltilt.tuning.study import Study
from fulltilt.tuning.trial.isolation import Isolation
from fulltilt.tuning.trial.measure import LoaderSupply, Saves, TrainingLoaders, _is_under_way
from tests.tuning.live_jobs import Squares


def test_a_pass_with_batches_left_is_under_way() -> None:
    passing = iter(DataLoader(Squares(4), batch_size=2))
    assert _is_under_way(passing)
    list(passing)
    assert not _is_under_way(passing)
    assert not _is_under_way(object())


def test_a_study_of_overlapping_passes_keeps_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = Study(["train.py"], ["python", "train.py"], tmp_path / "study", Space(2), Isolation("none"))
    assert study.space.may_persist
    study.record = replace(study.record, passes_overlap=True)
    assert not study.space.may_persist
    study.close()


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


def test_a_job_that_draws_no_more_batches_is_not_waited_for() -> None:
    """itertools.cycle keeps the batches of the first pass; validation and slow steps do not count."""
    never, cycles, slow = LoaderSupply(), LoaderSupply(), LoaderSupply()
    assert not any(never.has_ended(0.1 * step, step, 0) for step in range(150))
    assert never.has_ended(21.0, 210, 0)
    assert not any(cycles.has_ended(0.01 * step, step, step) for step in range(1000))
    assert not cycles.has_ended(14.0, 1400, 999)
    assert cycles.has_ended(15.5, 1550, 999)
    assert not cycles.has_ended(15.6, 1560, 1000)
    assert not any(slow.has_ended(10.0 * step, step, 7) for step in range(40))


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
