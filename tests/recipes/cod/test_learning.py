"""The cod recipe learns (``make test-recipes``): from scratch, on held-out made data, and not by accident."""

from __future__ import annotations

import csv
import random
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from fulltilt.cli import main as command
from fulltilt.recipes.cod.data import Pictures, pairs
from fulltilt.recipes.cod.trainer import iou
from fulltilt.recipes.synthetic import make_folder

pytestmark = [pytest.mark.slow, pytest.mark.recipes, pytest.mark.timeout(3600)]

SIZE, STAGE_1_EPOCHS = 64, 2


def learn(data: Path, out: Path, *, epochs: int) -> list[float]:
    """The held-out IoU after each epoch."""
    flags = (
        *("--backbone", "test_resnet", "--img-size", str(SIZE), "--decoder-width", "32", "--batch-size", "16"),
        *("--epochs", str(epochs), "--stage1-epochs", str(STAGE_1_EPOCHS), "--lr", "3e-3", "--stage2-lr", "3e-3"),
        "--no-progressive-unfreeze",  # of a backbone that knows nothing yet, no block is worth keeping as it is
    )
    with pytest.raises(SystemExit) as ended:
        command.main(["train", "cod", "--data", str(data), "--out", str(out), "--seed", "1", *flags])
    assert ended.value.code in (0, None)
    with (out / "metrics.csv").open() as file:
        return [float(row["eval_iou"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "cod"
    make_folder("cod", folder, 1000, 0)
    return folder


def chance(data: Path) -> float:
    """The best IoU of a prediction that never looks at the picture: the most usual places, at the best level."""
    train, test = (
        torch.stack([sample[1][0] for sample in Pictures(pairs(data, part), SIZE)]).float()
        for part in ("Train", "Test")
    )
    usual = train.mean(dim=0)
    guesses = [(usual >= level).float().expand_as(test) for level in torch.linspace(0, float(usual.max()), 21)]
    return max(float(iou(guess, test > 0).mean()) for guess in guesses)


def test_it_finds_what_is_hidden_and_stage_2_more_than_stage_1(data: Path, tmp_path: Path) -> None:
    began_s = time.monotonic()
    history = learn(data, tmp_path, epochs=16)
    assert time.monotonic() - began_s < 600, "alone on two cores it takes three minutes"
    assert history[-1] > 0.60
    assert history[-1] > chance(data) + 0.15
    assert history[-1] > max(history[:STAGE_1_EPOCHS]) + 0.05


def test_with_shuffled_labels_it_stays_at_chance(data: Path, tmp_path: Path) -> None:
    shuffled = tmp_path / "shuffled"
    for part in ("Train", "Test"):
        for kind in ("Image", "GT_Object"):
            (shuffled / part / kind).mkdir(parents=True)
    for path in [*(data / "Train" / "Image").iterdir(), *(data / "Test").rglob("*.*g")]:
        (shuffled / path.relative_to(data)).symlink_to(path)
    listed = pairs(data, "Train")
    others = [pair.mask for pair in listed]
    random.Random(0).shuffle(others)
    for pair, other in zip(listed, others, strict=True):
        with Image.open(pair.picture) as picture, Image.open(other) as mask:
            mask.resize(picture.size, Image.Resampling.NEAREST).save(shuffled / pair.mask.relative_to(data))
    history = learn(shuffled, tmp_path / "out", epochs=8)
    assert history[-1] < chance(data) + 0.05
