"""cod: EdgeNeXt-base at 384 px, batch 64, all of it trained, bf16, against the usual settings (8, 12 workers)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from feedbench.images import MEAN, STD
from feedbench.measuring import plain_step, stock_loader
from PIL import Image

from fulltilt.feed.worker_pool import default_workers
from fulltilt.recipes.cod import CodOptions
from fulltilt.recipes.cod.data import Pair, Pictures
from fulltilt.recipes.cod.trainer import build
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.synthetic import in_processes
from fulltilt.recipes.synthetic.cod import draw
from fulltilt.train import Job, TrainSettings
from recipebench.measuring import Bench, Repeated, stock_rate
from recipebench.turns import Turns, engine_turns, steps_of

# COD10K's pictures are about this large; made ones are drawn smaller and scaled up.
PICTURE = (1024, 768)
STOCK_BATCH, STOCK_WORKERS = 8, 12


def run(bench: Bench) -> None:
    """Fed and compute-only in turns, then the usual settings and ours at their batch."""
    size = 32 if bench.smoke else 384
    batch = 4 if bench.smoke else 64
    data = pictures(bench.work / "data", 24 if bench.smoke else 1024)
    options = CodOptions(
        backbone="test_resnet" if bench.smoke else "edgenext_base",
        img_size=size,
        stage1_epochs=0,
        progressive_unfreeze=False,
        stage2_lr=1e-4,
    )
    bench.note(promised="+20 %")
    turns = Turns(compute_steps(bench, options, data, batch), bench)
    # Epochs of more than a hundred steps: turns need whole stretches of one.
    job = engine_job(bench, options, data, batch, 4 if bench.smoke else 8)
    bench.note(**engine_turns(*job, bench.work / "fed", turns))
    bench.note(stock=usual_rate(bench, options, data))
    if bench.left_s() > bench.another_s:
        job = engine_job(bench, options, data, STOCK_BATCH, 4 if bench.smoke else 2)
        alone = Turns(None, bench, turn_s=2.5, turns=1)
        bench.note(fed_at_stock_batch=engine_turns(*job, bench.work / "small", alone)["fed"])


def engine_job(bench: Bench, options: CodOptions, data: Path, batch: int, again: int) -> tuple[Job, TrainSettings]:
    """The recipe's own job on ``again`` times the pictures, without evaluation."""
    settings = TrainSettings(
        epochs=1000,
        batch_size=batch,
        lr=1e-4,
        clip_norm=1.0,
        device=bench.device.type,
        workers=0 if bench.smoke else default_workers(),
        compile=bench.compiles,
        cuda_graphs=True,
    )
    job = build(Request(options, settings, data, bench.work))
    return replace(job, data=Repeated(job.data, again), eval_data=None), settings


def compute_steps(bench: Bench, options: CodOptions, data: Path, batch: int) -> Callable[[int], int]:
    """The plain step on a batch that is on the device."""
    job = build(Request(options, TrainSettings(), data, bench.work))
    images = torch.randn(batch, 3, options.img_size, options.img_size, device=bench.device)
    masks = (torch.rand(batch, 1, options.img_size, options.img_size, device=bench.device) > 0.8).to(torch.uint8)
    step = plain_step(bench.trained(job.model), job.loss, clip_norm=1.0)
    return steps_of(step, (images, masks), batch)


def usual_rate(bench: Bench, options: CodOptions, data: Path) -> float:
    """The usual settings: a stock loader that augments on the CPU, batch 8, 12 workers, fp16 with a scaler."""
    job = build(Request(options, TrainSettings(), data, bench.work))
    model = job.model.to(bench.device).train()
    workers = 1 if bench.smoke else STOCK_WORKERS
    samples = OnTheCpu(job.data, options.img_size)
    loader = stock_loader(samples, STOCK_BATCH, workers, bench.device, persistent_workers=False)
    step = plain_step(model, job.loss, dtype=torch.float16)
    return stock_rate(bench, loader, step, STOCK_BATCH, 10)


class OnTheCpu(torch.utils.data.Dataset[Any]):
    """Pictures as such trainers load them: flipped, jittered and normalised in the worker, float32 to the GPU."""

    def __init__(self, pictures: Any, size: int) -> None:
        from torchvision import transforms

        self.pictures = Pictures(pictures.pairs, size)
        self.jitter = transforms.ColorJitter(0.2, 0.2, 0.2)
        self.mean = torch.tensor(MEAN)[:, None, None]
        self.std = torch.tensor(STD)[:, None, None]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, mask = self.pictures[index]
        if torch.rand(()) < 0.5:
            image, mask = image.flip(2), mask.flip(2)
        image = self.jitter(image).float() / 255
        return (image - self.mean) / self.std, mask.float()


def pictures(folder: Path, count: int) -> Path:
    """COD10K folders with ``count`` pictures to train on, as large as the real ones."""
    for part in ("Train", "Test"):
        for kind in ("Image", "GT_Object"):
            (folder / part / kind).mkdir(parents=True)
    for _ in in_processes(functools.partial(_write, folder), count + 1):
        pass
    return folder


def _write(folder: Path, numbers: range) -> None:
    for number in numbers:
        picture, mask = draw(number, 0)
        part = folder / ("Test" if number == 0 else "Train")
        pair = Pair(part / "Image" / f"made-{number}.jpg", part / "GT_Object" / f"made-{number}.png")
        Image.fromarray(picture).resize(PICTURE).save(pair.picture, quality=92)
        Image.fromarray(mask).resize(PICTURE).save(pair.mask, compress_level=1)
