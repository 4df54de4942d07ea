"""Does augmentation on the device train as well as the usual one on the CPU? The COD recipe's network on made data.

    python bench/parity.py --out parity.json          under 150 s on an H200
    python bench/parity.py --cpu                      smaller, on two CPU cores a few minutes

Two ways to the same batches: the feed (deterministic part once, augmentation of whole batches on the device) and
torchvision v2 per sample in the data set. Same chain, same network, same steps, several seeds; what counts is IoU on
pictures that neither has seen. Within noise: the means differ by less than two standard errors of their difference.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from children import process_start_s, versions
from feedbench.images import MEAN, STD, PerSample, cod_chain

from fulltilt.feed import augment
from fulltilt.recipes.cod import model as network
from fulltilt.recipes.cod.data import Pictures, pairs
from fulltilt.recipes.cod.trainer import deep_loss, iou, structure_loss
from fulltilt.recipes.synthetic import make_folder
from fulltilt.train import Job, TrainSettings, train
from fulltilt.train.progress import TrainingScreen

# What is not given.
ON_CPU = {"epochs": 12, "size": 48, "pictures": 120, "workers": 0, "backbone": "test_resnet"}
ON_CPU |= {"batch_size": 16, "budget_s": 900.0}
# Few large steps: on a machine where starting a kernel takes 25 µs, a step costs the same at any batch.
ON_GPU = {"epochs": 24, "size": 128, "pictures": 400, "workers": 8, "backbone": "edgenext_xx_small"}
ON_GPU |= {"batch_size": 32, "budget_s": 140.0}


class AugmentedHere(torch.utils.data.Dataset[Any]):
    """The usual way: torchvision v2 on each sample, in the worker that fetches it."""

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures
        self.augmented = PerSample(cod_chain().per_sample)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.augmented(*self.pictures[index])


def on_device() -> augment.Pipeline:
    """The same chain for whole batches."""
    # Not compiled: it computes the same, and six runs would spend a minute on it.
    return augment.Pipeline([*cod_chain().per_batch, augment.Normalise(MEAN, STD)], compile=False)


def only_normalised() -> augment.Pipeline:
    """No augmentation at all."""
    return augment.Pipeline([augment.Normalise(MEAN, STD)], compile=False)


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The recipe's own."""
    images, masks = batch
    prediction, auxiliary, deep = model(images, return_deep_supervision=True)
    return deep_loss(prediction, deep, auxiliary, masks, 0.01)


def eval_loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Loss and IoU."""
    images, masks = batch
    prediction = model(images).float()
    return structure_loss(prediction, masks), {"iou": iou(torch.sigmoid(prediction)[:, 0], masks[:, 0] > 0).mean()}


def run(way: str, seed: int, data: Path, arguments: argparse.Namespace) -> float:
    """Train once; returns IoU on the test pictures."""
    torch.manual_seed(seed)
    train_pictures, test_pictures = (Pictures(pairs(data, part), arguments.size) for part in ("Train", "Test"))
    model = network.build(arguments.backbone, arguments.size, width=32, num_experts=3)
    job = Job(
        model=model,
        loss=loss,
        data=AugmentedHere(train_pictures) if way == "cpu" else train_pictures,
        augment=None if way == "cpu" else on_device() if way == "device" else only_normalised(),
        eval_data=test_pictures,
        eval_augment=only_normalised(),
        eval_loss=eval_loss,
    )
    settings = TrainSettings(
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        lr=2e-3,
        warmup_epochs=1,
        clip_norm=1.0,
        seed=seed,
        workers=arguments.workers,
        device="cpu" if arguments.cpu else "auto",
        eval_every=arguments.epochs,
        eval_batch_size=64,
        residency="none" if way == "cpu" else "auto",
        record=False,
    )
    with tempfile.TemporaryDirectory() as out:
        outcome = train(job, settings, Path(out), screen=TrainingScreen(Path(out), stream=io.StringIO(), sampled=False))
    found: float = outcome.metrics["eval_iou"]
    return found


def compare(left: list[float], right: list[float]) -> dict[str, float | bool]:
    """The difference of the means, its standard error (Welch), and whether it is within two of them."""
    difference = statistics.mean(left) - statistics.mean(right)
    error = math.sqrt(statistics.variance(left) / len(left) + statistics.variance(right) / len(right))
    return {"difference": difference, "standard_error": error, "within_noise": abs(difference) <= 2 * error}


def main() -> int:
    """Print the runs and write the figures; 1 when the two ways differ by more than noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="parity-bench.json", help="where the figures are written after each run")
    parser.add_argument("--cpu", action="store_true", help="a smaller size, on the CPU")
    parser.add_argument("--seeds", type=int, default=3, help="at least 2")
    parser.add_argument("--without", action="store_true", help="a third way as well: no augmentation at all")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--size", type=int, help="side of the pictures")
    parser.add_argument("--pictures", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--budget-s", type=float, help="no further seed that would end after it")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--backbone", help="any timm backbone")
    on_cpu = parser.parse_args().cpu or not torch.cuda.is_available()
    parser.set_defaults(**(ON_CPU if on_cpu else ON_GPU), cpu=on_cpu)
    arguments = parser.parse_args()
    started_s = process_start_s()
    result: dict[str, Any] = {"command": sys.argv, "settings": vars(arguments), "iou": {"device": [], "cpu": []}}
    result["versions"] = versions(("torch", "timm"))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "cod"
        make_folder("cod", data, arguments.pictures, 0)
        if arguments.without:
            result["iou"]["none"] = []
        longest_s = 0.0
        for seed in range(arguments.seeds):
            seed_began_s = time.monotonic()
            if seed >= 2 and seed_began_s - started_s + longest_s > arguments.budget_s:
                print(f"seed {seed} is left out: no time left", flush=True)
                break
            for way in result["iou"]:
                began = time.perf_counter()
                found = run(way, seed, data, arguments)
                result["iou"][way].append(round(found, 4))
                print(f"seed {seed}  {way:<7} IoU {found:.4f}  {time.perf_counter() - began:6.1f} s", flush=True)
                Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
            longest_s = max(longest_s, time.monotonic() - seed_began_s)
    result["comparison"] = compare(result["iou"]["device"], result["iou"]["cpu"])
    Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    for way, values in result["iou"].items():
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        print(f"{way:<7} mean IoU {mean:.4f} ± {deviation:.4f} over {len(values)} seeds")
    print("{difference:.4f} ± {standard_error:.4f}, within noise: {within_noise}".format(**result["comparison"]))
    print(f"figures: {arguments.out}")
    return 0 if result["comparison"]["within_noise"] else 1


if __name__ == "__main__":
    sys.exit(main())
