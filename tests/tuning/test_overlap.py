"""Two passes over one loader at once are told from passes that follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from fulltilt.tuning.space import Space
from fulltilt.tuning.study import Study
from fulltilt.tuning.trial.isolation import Isolation
from fulltilt.tuning.trial.measure import OverlappingPasses
from tests.tuning.live_jobs import Squares


def seen(*, peeks: bool, abandons: bool = False, persists: bool = False) -> bool:
    overlap = OverlappingPasses()
    workers = {"num_workers": 1, "persistent_workers": True} if persists else {}
    loader = DataLoader(Squares(8), batch_size=2, **workers)

    def begun() -> Iterator[Any]:
        source = iter(loader)
        overlap.began(0, source)
        return source

    for _ in range(2):
        source = begun()
        next(source)
        if peeks:
            next(begun())
            next(source)
        if abandons:
            source = begun()
            next(source)
    return overlap.seen


def test_only_a_pass_that_goes_on_overlaps() -> None:
    assert seen(peeks=True)
    assert not seen(peeks=False)
    assert not seen(peeks=False, abandons=True)
    assert not seen(peeks=True, persists=True)


def test_a_study_of_overlapping_passes_keeps_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = Study(["train.py"], ["python", "train.py"], tmp_path / "study", Space(2), Isolation("none"))
    assert study.space.may_persist
    study.record = replace(study.record, passes_overlap=True)
    assert not study.space.may_persist
    study.close()
