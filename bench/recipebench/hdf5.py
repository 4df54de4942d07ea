"""hdf5: windows of 64×16 floats, batch 8192, the compact network, against a stock DataLoader, window by window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from feedbench.measuring import plain_step, stock_loader
from feedbench.windows import SampleBySample

from fulltilt.recipes.hdf5 import RECIPE, Hdf5Options
from fulltilt.recipes.hdf5.data import FileShare, read_folder
from fulltilt.recipes.hdf5.model import WindowNet, binary_loss
from fulltilt.recipes.hdf5.trainer import build, reader
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.synthetic.hdf5 import CHANNELS, CHUNK, STEPS
from fulltilt.train import TrainSettings
from recipebench.measuring import Bench, stock_rate
from recipebench.turns import Turns, engine_turns, steps_of

STOCK_BATCH, STOCK_WORKERS, STOCK_PREFETCH = 8192, 8, 16


def run(bench: Bench) -> None:
    """Fed and compute-only in turns, then the usual settings. Its batch is ours."""
    batch = 64 if bench.smoke else 8192
    data = recordings(bench.work / "data", 512 if bench.smoke else 64 * 8192)
    bench.note(promised="1.67")
    turns = Turns(compute_steps(bench, batch), bench)
    # Several hundred steps an epoch: turns need whole stretches of one.
    bench.note(**fed_figures(bench, data, batch, turns, again=2 if bench.smoke else 5))
    bench.note(stock=usual_rate(bench, data))


def fed_figures(bench: Bench, data: Path, batch: int, turns: Turns, again: int) -> dict[str, Any]:
    """The recipe on ``again`` times the files, without evaluation."""
    settings = TrainSettings(
        **{
            **RECIPE.settings,
            "epochs": 1000,
            "batch_size": batch,
            "drop_last": True,
            "monitor": None,
            "workers": 0 if bench.smoke else STOCK_WORKERS,
            "device": bench.device.type,
        }
    )
    request = Request(Hdf5Options(), settings, data, bench.work / "fed")
    found = read_folder(data, request.options)
    train = FileShare(found.train.files * again)
    with reader(request, train, training=True) as rows, reader(request, found.validation, training=False) as held:
        job = build(request, found, rows, held)
        bench.remark(f"rows kept in {rows.tier}, {rows.source.samples:,} windows")
        return engine_turns(replace(job, eval_data=None, eval_metrics=None), settings, request.out, turns)


def compute_steps(bench: Bench, batch: int) -> Callable[[int], int]:
    """The plain step on a batch that is on the device."""
    model = WindowNet(CHANNELS).to(bench.device).train()
    parts = (
        torch.randn(batch, STEPS, CHANNELS, device=bench.device),
        torch.arange(batch, device=bench.device) % 6 == 0,
    )
    step = plain_step(model, loss, clip_norm=1.0)
    return steps_of(step, parts, batch)


def usual_rate(bench: Bench, data: Path) -> float:
    """A stock loader that reads one window after the other, 8 workers × 16 batches ahead."""
    batch, workers = (16, 1) if bench.smoke else (STOCK_BATCH, STOCK_WORKERS)
    samples = SampleBySample(data / "train-0.h5", "features", "labels")
    loader = stock_loader(samples, batch, workers, bench.device, prefetch_factor=STOCK_PREFETCH)
    model = WindowNet(CHANNELS).to(bench.device).train()
    step = plain_step(model, loss)
    return stock_rate(bench, loader, step, batch, 12)


def loss(model: Any, parts: Any) -> torch.Tensor:
    """The recipe's loss."""
    windows, labels = parts
    return binary_loss(model(windows), labels, "pos_weight", 5.0, 2.0)


def recordings(folder: Path, count: int) -> Path:
    """One file of ``count`` windows to train on, and a small one held out. Their values do not change the speed."""
    folder.mkdir(parents=True)
    block = np.random.default_rng(0).standard_normal((min(count, 8192), STEPS, CHANNELS), dtype=np.float32)
    for name, windows in (("train-0.h5", count), ("val-0.h5", min(count, 8192))):
        with h5py.File(folder / name, "w") as file:
            shape = (windows, STEPS, CHANNELS)
            features = file.create_dataset("features", shape, "f4", chunks=(CHUNK, STEPS, CHANNELS))
            for start in range(0, windows, len(block)):
                features[start : start + len(block)] = block[: windows - start]
            file["labels"] = (np.arange(windows) % 6 == 0).astype(np.uint8)
    return folder
