"""Inside a trial: settings in force on the training loader alone; what it sees of loaders and checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from fulltilt.recorder.session import Session
from fulltilt.records import LoaderRecord, Settings
from fulltilt.tuning.trial.measure import AppliedSettings, Saves, TrialMeasurement
from fulltilt.tuning.trial.throughput import Assignment
from tests.diagnosis import examples

DATA = TensorDataset(torch.arange(64.0).reshape(32, 2))


Install = Callable[..., AppliedSettings]


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    """Puts settings in force in a recorded process; what a trial changes for good is put back."""
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.begin_here()

    def put_in_force(settings: Settings, loader: LoaderRecord | None = None) -> AppliedSettings:
        changes = AppliedSettings(settings, loader)
        changes.install(torch, session.loaders)
        return changes

    yield put_in_force
    session.finish()
    if torch.is_autocast_enabled("cpu"):
        torch.set_autocast_enabled("cpu", False)
        torch.autocast_decrement_nesting()


def test_only_the_training_loader_is_changed(install: Install) -> None:
    install(Settings(num_workers=2, prefetch_factor=4, persistent_workers=True))
    train, test = DataLoader(DATA, 4, shuffle=True), DataLoader(DATA, 4)
    assert (train.num_workers, train.prefetch_factor, train.persistent_workers) == (2, 4, True)
    assert (train.batch_size, test.num_workers) == (4, 0)


def test_a_loader_is_known_by_its_line_and_its_length(install: Install) -> None:
    line = test_a_loader_is_known_by_its_line_and_its_length.__code__.co_firstlineno + 5
    studied = examples.loader(where=f"tests/tuning/test_measure.py:{line}", dataset_len=32)
    install(Settings(num_workers=2), studied)
    # Not shuffled, made in one loop: only the length tells them apart.
    made = [DataLoader(data, 4) for data in (DATA, TensorDataset(torch.zeros(5)))]
    assert [loader.num_workers for loader in made] == [2, 0]


def test_the_batch_size_stays_unless_it_is_asked_for(install: Install) -> None:
    install(Settings(num_workers=1))
    assert DataLoader(DATA, batch_size=4, shuffle=True).batch_size == 4
    install(Settings(batch_size=16))
    assert DataLoader(DATA, batch_size=4, shuffle=True).batch_size == 16


def test_a_batch_size_that_cannot_be_changed_is_told(install: Install) -> None:
    changes = install(Settings(batch_size=16))
    sampler: Any = BatchSampler(RandomSampler(DATA), 4, drop_last=False)
    assert len(next(iter(DataLoader(DATA, batch_sampler=sampler)))[0]) == 4
    assert "batch_sampler" in changes.remarks[0]


def test_precision_follows_the_weights_through_the_steps(install: Install) -> None:
    install(Settings(precision="bf16"))
    model, inputs = nn.Linear(8, 8), torch.ones(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first = model(inputs)
    assert first.dtype is torch.bfloat16
    first.sum().backward()
    optimizer.step()
    assert not torch.allclose(model(inputs).float(), first.float())  # not the copy from before the step


def test_the_model_is_compiled_before_its_parts(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))  # noqa: PLW0108 - binds
    install(Settings(compile=True))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    nn.Flatten()(torch.ones(1, 4))  # nothing to train in it
    model(torch.ones(1, 4))
    model(torch.ones(1, 4))
    assert compiled == [model]


# --------------------------------------------------------------------------- measuring


def stats(loader_id: int, batches: int, eval_batches: int = 0) -> Any:
    counts = {"batches": batches, "eval_batches": eval_batches, "samples": 8 * batches, "counted": True}
    return SimpleNamespace(loader_id=loader_id, wait_s=0.5, described={"num_workers": 2}, **counts)


def test_loaders_side_by_side_train_and_only_evaluation_interrupts() -> None:
    """zip(labelled, unlabelled): backward() comes after a batch of the second; such a trial never measured anything."""
    loaders = [stats(0, batches=20), stats(1, batches=20), stats(2, batches=10, eval_batches=10)]
    session: Any = SimpleNamespace(loaders=SimpleNamespace(all=loaders))
    seen = TrialMeasurement(session, torch, Assignment(Settings(), folder=""))._snapshot()
    assert (seen.batches, seen.samples, seen.wait_s, seen.workers) == (40, 320, 1.0, 4)
    assert seen.interruptions == 10


def test_saves_go_to_the_scratch_folder_and_are_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers  # noqa: F401 - its savers, too

    monkeypatch.chdir(tmp_path)
    Path("model.pt").write_text("the user's")
    saves = Saves(str(tmp_path / "scratch"))
    saves.install()
    try:
        torch.save({"step": 1}, "model.pt")
        torch.save({"step": 2}, f=Path("deep/other.pt"))
        safetensors.torch.save_file({"weight": torch.zeros(1)}, "model.safetensors")
        assert torch.load("model.pt") == {"step": 1}
        assert torch.load("deep/other.pt") == {"step": 2}
        assert saves.count == 3
        assert Path("model.pt").read_text() == "the user's"
        assert sorted(os.listdir()) == ["model.pt", "scratch"]
    finally:
        saves.patches.restore()
    assert torch.save is torch.serialization.save
