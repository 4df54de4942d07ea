"""HDF5 windows at batch 8192: resident, streamed in blocks, and read sample by sample."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import h5py
import torch
from torch import nn
from torch.utils.data import Dataset

from feedbench.measuring import Bench, first_of, on_device, stock_loader, trainer
from fulltilt import feed
from fulltilt.feed.tiers import Residency
from fulltilt.train.cuda_graphs import EAGER_FIRST


class SampleBySample(Dataset[Any]):
    """Windows and labels as trainers often read them: ``h5[i]``, from a file that each worker opens for itself."""

    def __init__(self, path: str | Path, windows: str, labels: str) -> None:
        self.path, self.keys = path, (windows, labels)
        self.file: Any = None
        with h5py.File(path, "r") as file:
            self.length = len(file[labels])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        windows, labels = (self.file[key] for key in self.keys)
        return torch.from_numpy(windows[index]), torch.tensor(float(labels[index]))


def run_hdf5(bench: Bench) -> None:
    """64 × 16 float windows, a small convolutional classifier."""
    batch_size, count = (64, 1024) if bench.smoke else (8192, 524_288)
    path = str(bench.folder / "windows.h5")
    _write(path, count)
    model = nn.Sequential(
        nn.Conv1d(16, 64, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv1d(64, 64, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 1),
    ).to(bench.device)
    compiled = model if bench.smoke else torch.compile(model)

    def loss_of(network: nn.Module, batch: Any) -> torch.Tensor:
        windows, labels = batch
        return nn.functional.binary_cross_entropy_with_logits(network(windows.transpose(1, 2))[:, 0].float(), labels)

    step = trainer(compiled, loss_of)
    fixed = [(torch.randn(batch_size, 64, 16, device=bench.device), torch.zeros(batch_size, device=bench.device))]
    for _ in range(EAGER_FIRST + 2):
        step(fixed[0])
    options: dict[str, Any] = {"drop_last": True, "device": bench.device}
    resident: Residency = "ram" if bench.device.type == "cpu" else "vram"
    with feed.hdf5(path, ["x", "y"], batch_size, residency=resident, **options) as loader:
        bench.note("hdf5", "first_epoch", bench.epoch_rate(step, loader, first_of))
        bench.against_compute("hdf5", f"feed_{resident}", step, lambda: fixed, lambda: loader, first_of)
    if bench.has_time_for(10):
        with feed.hdf5(path, ["x", "y"], batch_size, residency="none", mixing_rows=count // 4, **options) as loader:
            streamed, cpu = bench.rate(step, lambda: loader, first_of, 5)
            bench.note("hdf5", "feed_streamed", streamed)
            bench.note("hdf5", "streamed_over_compute", streamed / bench.results["hdf5"]["compute_only"])
            bench.note("hdf5", "feed_streamed_host_cpu_pct", cpu)
            bench.note("hdf5", "feed_streamed_mixing_samples", loader.mixing)
    fed = bench.results["hdf5"][f"feed_{resident}"]
    for name, usual, prefetch in (("sample_by_sample", 8, 16), ("sample_by_sample_4_workers", 4, 8)):
        if not bench.has_time_for(25):
            bench.note("hdf5", name, "no time left")
            continue
        workers = 1 if bench.smoke else usual
        samples = SampleBySample(path, "x", "y")
        stock = stock_loader(samples, batch_size, workers, bench.device, prefetch_factor=prefetch)
        batches = functools.partial(on_device, stock, bench.device)
        rate, _ = bench.rate(step, batches, first_of, 8, workers=workers)
        bench.note("hdf5", name, rate)
        bench.note("hdf5", f"fed_over_{name}", fed / rate)
        del stock, batches


def _write(path: str, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (count, 64, 16), "f4", chunks=(256, 64, 16))
        y = file.create_dataset("y", (count,), "f4", chunks=(8192,) if count > 8192 else None)
        part = min(count, 65_536)
        # The same in every part: its values are fed, not learnt.
        windows = torch.randn(part, 64, 16, generator=generator).numpy()
        for start in range(0, count, part):
            here = min(part, count - start)
            x[start : start + part] = windows[:here]
            y[start : start + part] = torch.randint(0, 2, (here,), generator=generator).float().numpy()
