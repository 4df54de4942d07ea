"""The recipe learns what made texts mean, and learns nothing where the labels say nothing."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from fulltilt.recipes import options
from fulltilt.recipes.synthetic import make_folder
from fulltilt.recipes.visobert import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.recipes, pytest.mark.timeout(3600)]

# About a minute on two cores.
SETTINGS = {
    "batch_size": 32,
    "epochs": 4,
    "lr": 1e-3,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 2000,
    "max_length": 64,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "text"
    make_folder("text", folder, 4000, 0)
    return folder


def macro_f1(data: Path, out: Path) -> float:
    request = options.read(RECIPE, {"data": str(data), "out": str(out), **SETTINGS})
    return dict(RECIPE.run(request))["eval_macro_f1"]


def test_texts_are_told_apart(texts: Path, tmp_path: Path) -> None:
    assert macro_f1(texts, tmp_path / "out") > 0.80


def test_shuffled_labels_teach_nothing(texts: Path, tmp_path: Path) -> None:
    """Guessing by the classes' shares has a macro-F1 of a third."""
    for name in ("train.csv", "validation.csv"):
        with (texts / name).open(encoding="utf-8", newline="") as file:
            rows = [*csv.DictReader(file)]
        labels = [row["label"] for row in rows]
        if name == "train.csv":
            random.Random(0).shuffle(labels)
        with (tmp_path / name).open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerows([("text", "label"), *zip([row["text"] for row in rows], labels, strict=True)])
    assert macro_f1(tmp_path, tmp_path / "out") < 0.42
