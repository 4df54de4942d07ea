"""carclip: CLIP ViT-B/32 at 224 px, batch 256, bf16, against the usual settings (128, 12 workers, fp16)."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feedbench.measuring import plain_step, stock_loader

from fulltilt.recipes.carclip import CarClipOptions
from fulltilt.recipes.carclip.trainer import build, contrastive_loss
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.synthetic import in_processes
from fulltilt.recipes.synthetic.cars import CAPTIONS, COLUMNS, described, picture
from fulltilt.train import Job, TrainSettings
from recipebench.measuring import Bench, Repeated, stock_rate
from recipebench.turns import Turns, engine_turns, steps_of

# A photo of a car from the web is about this large; made ones are drawn smaller and scaled up.
PICTURE = (640, 480)
STOCK_BATCH, STOCK_ACCUMULATION, STOCK_WORKERS, STOCK_PREFETCH = 128, 2, 12, 4


def run(bench: Bench) -> None:
    """Fed and compute-only in turns, then the usual settings and ours with their batch and parts."""
    batch = 8 if bench.smoke else 256
    data = pictures(bench.work / "data", 40 if bench.smoke else 1200)
    bench.note(promised="2 to 3")
    turns = Turns(compute_steps(bench, data, batch), bench)
    # Epochs of more than a hundred steps: turns need whole stretches of one.
    again = 4 if bench.smoke else 26
    bench.note(**engine_turns(*engine_job(bench, data, batch, 1, again), bench.work / "fed", turns))
    bench.note(stock=usual_rate(bench, data))
    bench.remark("the usual accumulation compares 128 captions a step; ours at its batch compares 256 (GradCache)")
    if bench.left_s() > bench.another_s:
        part, again = (4, again) if bench.smoke else (STOCK_BATCH, 12)
        job = engine_job(bench, data, part, STOCK_ACCUMULATION, again)
        alone = Turns(None, bench, turn_s=3, turns=1)
        bench.note(fed_at_stock_batch=engine_turns(*job, bench.work / "parts", alone)["fed"])


def recipe_job(bench: Bench, data: Path, settings: TrainSettings) -> Job:
    """The recipe's own job."""
    options = CarClipOptions(model="small" if bench.smoke else "vit-b-32")
    return build(Request(options, settings, data, bench.work / "out"))


def engine_job(bench: Bench, data: Path, batch: int, accumulation: int, again: int) -> tuple[Job, TrainSettings]:
    """The recipe's job on ``again`` times the pictures, without evaluation."""
    settings = TrainSettings(
        epochs=1000,
        batch_size=batch,
        accumulation=accumulation,
        lr=2e-5,
        clip_norm=1.0,
        drop_last=True,
        device=bench.device.type,
        compile=bench.compiles,
        cuda_graphs=True,
    )
    job = recipe_job(bench, data, settings)
    samples: Any = job.data
    with ThreadPoolExecutor(16) as pool:  # decoded once, so that the first pass is short
        decoded = list(pool.map(samples.__getitem__, range(len(samples))))
    return replace(job, data=Repeated(decoded, again), eval_data=None, eval_metrics=None), settings


def compute_steps(bench: Bench, data: Path, batch: int) -> Callable[[int], int]:
    """The plain step on a batch that is on the device."""
    job = recipe_job(bench, data, TrainSettings(device=bench.device.type))
    samples: Any = job.data
    side, device = samples.side, bench.device
    parts = (
        torch.rand(batch, 3, side, side, device=device),
        samples.tokens[:1, 0].repeat(batch, 1).to(device),
        torch.arange(batch, device=device),
    )
    step = plain_step(bench.trained(job.model), compared, lr=2e-5, clip_norm=1.0)
    return steps_of(step, parts, batch)


def usual_rate(bench: Bench, data: Path) -> float:
    """The usual command: a stock loader that prepares pictures in 12 workers, batch 128, fp16 with a scaler.

    It steps after every batch; leaving every second step out, as its accumulation does, would save 1 to 2 %.
    """
    job = recipe_job(bench, data, TrainSettings(device=bench.device.type))
    batch, workers = (4, 1) if bench.smoke else (STOCK_BATCH, STOCK_WORKERS)
    samples, options = OnTheCpu(job.data), {"prefetch_factor": STOCK_PREFETCH, "persistent_workers": False}
    loader = stock_loader(samples, batch, workers, bench.device, **options)
    step = plain_step(job.model.to(bench.device).train(), compared, lr=2e-5, dtype=torch.float16)
    return stock_rate(bench, loader, step, batch, 10)


def compared(model: Any, parts: Any) -> Any:
    """The recipe's loss on a batch as a stock loader gives it."""
    return contrastive_loss(model, [dict(zip(("image", "tokens", "car"), parts, strict=True))])


class OnTheCpu(torch.utils.data.Dataset[Any]):
    """Pictures as such trainers load them: decoded, cropped and flipped in the worker, float32 to the GPU."""

    def __init__(self, samples: Any) -> None:
        from torchvision import transforms

        self.samples = samples
        self.prepare = transforms.Compose(
            [
                transforms.RandomResizedCrop(samples.side, scale=(0.8, 1.0), ratio=(0.9, 1.1), interpolation=3),
                transforms.RandomHorizontalFlip(),
                transforms.ColorJitter(0.2, 0.2),
                transforms.ToTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from PIL import Image

        with Image.open(self.samples.paths[index]) as opened:
            image = self.prepare(opened.convert("RGB"))
        tokens = self.samples.tokens[self.samples.rows[index], 0]
        return image, tokens, self.samples.cars[index]


def pictures(folder: Path, count: int) -> Path:
    """A folder of made cars with captions, in pictures as large as real ones."""
    folder.mkdir()
    with (folder / CAPTIONS).open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for index in range(count):
            # The first few to validate: the recipe wants some, the bench does not look at them.
            table.writerow(
                {**described(0, index)[1], "image": f"{index}.jpg", "split": "val" if index < 4 else "train"}
            )
    for _ in in_processes(functools.partial(_write, folder), count):
        pass
    return folder


def _write(folder: Path, numbers: range) -> None:
    for number in numbers:
        look, _ = described(0, number)
        picture(look, np.random.default_rng(number)).resize(PICTURE).save(folder / f"{number}.jpg", quality=92)
