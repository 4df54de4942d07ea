"""Fixes are written as the users of a library would write them."""

from __future__ import annotations

import pytest

from fulltilt.diagnosis.libraries import LIBRARIES, library_of, loader_call, setting_name
from fulltilt.records import HotLine
from tests.diagnosis.examples import loader


@pytest.mark.parametrize(
    ("library", "written"),
    [
        ("transformers", "TrainingArguments(..., dataloader_num_workers=4, dataloader_persistent_workers=True)"),
        ("ultralytics", "model.train(..., workers=4)"),
        ("skorch", "NeuralNet(..., iterator_train__num_workers=4)"),
        ("timm", "create_loader(..., num_workers=4, persistent_workers=True)"),
        ("keras", "super().__init__(workers=4, use_multiprocessing=True) in the PyDataset that makes the batches"),
        ("unknown", None),
    ],
)
def test_settings_are_written_in_the_librarys_words(library: str, written: str | None) -> None:
    assert loader_call(library, {"num_workers": 4, "persistent_workers": True}) == written


def test_the_setting_for_workers_has_the_librarys_name() -> None:
    assert setting_name(loader(made_by="ultralytics"), "num_workers") == "workers"
    assert setting_name(loader(made_by=None), "num_workers") == "num_workers"


def test_a_line_inside_of_a_library_is_known() -> None:
    line = HotLine("ultralytics/utils/patches.py:238", "torch_save", 1.0)
    assert library_of(line) is LIBRARIES["ultralytics"]
    assert library_of(HotLine("train.py:3", "main", 1.0)) is None
