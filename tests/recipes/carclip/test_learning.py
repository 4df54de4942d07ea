"""The recipe learns what made cars look like, and learns nothing from captions of other cars."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from fulltilt.cli.train import run_recipe
from fulltilt.recipes.carclip import RECIPE
from fulltilt.recipes.carclip.data import read
from fulltilt.recipes.synthetic import make_folder

pytestmark = [pytest.mark.slow, pytest.mark.recipes, pytest.mark.timeout(3600)]

# Two to three minutes each on two idle cores.
SETTINGS = {
    "image_size": 64,
    "batch_size": 64,
    "epochs": 8,
    "lr": 1e-3,
    "augment": False,
    "workers": 0,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def cars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "cars"
    make_folder("cars", folder, 3000, 0)
    return folder


def times_chance(data: Path, out: Path) -> float:
    """Recall at 1 after training, as a multiple of that of guessing."""
    given = {"data": str(data), "out": str(out), "eval_every": SETTINGS["epochs"], "export": False, **SETTINGS}
    assert run_recipe(RECIPE, given) == 0
    with (out / "metrics.csv").open(newline="") as file:
        rows = [*csv.reader(file)]
    columns = [row for row in rows if row[0] == "epoch"][-1]
    gallery = len({picture.car for picture in read(data, 0.1) if picture.split == "val"})
    return float(rows[-1][columns.index("eval_recall_at_1")]) * gallery


def test_pictures_find_their_captions(cars: Path, tmp_path: Path) -> None:
    assert times_chance(cars, tmp_path / "out") > 20


def test_captions_of_other_cars_teach_nothing(cars: Path, tmp_path: Path) -> None:
    with (cars / "captions.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    told = [{name: value for name, value in row.items() if name not in ("image", "split")} for row in rows]
    random.Random(0).shuffle(told)
    with (tmp_path / "shuffled.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        for row, words in zip(rows, told, strict=True):
            table.writerow({**words, "image": str(cars / row["image"]), "split": row["split"]})
    assert times_chance(tmp_path / "shuffled.csv", tmp_path / "out") < 4
