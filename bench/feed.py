"""How close to compute-only a fed job runs: stock DataLoader against feed.loader on every tier, all in one run.

    python bench/feed.py                              all jobs, on the GPU
    python bench/feed.py --jobs cod,hdf5 --out x.json
    python bench/feed.py --smoke                      tiny models on the CPU: does the benchmark itself work?

Each job runs in a process of its own and writes its figures as it gets them, so that a job that fails or runs out of
time loses only what it had not measured yet. Rates are samples per second, by the wall clock, the device drained at
both ends. "compute-only" is the same step on a batch that is already on the device.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fulltilt import feed
from fulltilt.feed import augment
from fulltilt.feed.text import padding_waste
from fulltilt.feed.tiers import default_workers

JOBS = ("cod", "clip", "text", "hdf5")
# Seconds a job may take, start and compilation included; together below eight minutes.
BUDGET_S = {"cod": 170, "clip": 140, "text": 70, "hdf5": 90}
TARGETS = {
    "cod": {"fed_over_compute": 0.97, "fed_over_best_stock": 2.5, "disk_over_compute": 0.90},
    "clip_b256": {"fed_over_compute": 0.97},
    "clip_b1024": {"fed_over_compute": 0.97},
    "text": {"fed_over_compute": 0.97, "fed_over_pad_to_128": 1.5},
    "hdf5": {"fed_over_compute": 0.95, "fed_over_guide_5": 100.0},
}
TIERS = ("vram", "pinned", "ram", "disk", "none")


class Bench:
    """What one job needs: the device, the sizes of a smoke run or a real one, and somewhere to note figures."""

    def __init__(self, out: Path, budget_s: float, *, smoke: bool, workers: list[int]) -> None:
        self.out = out
        self.smoke = smoke
        self.workers = workers
        self.device = torch.device("cpu" if smoke or not torch.cuda.is_available() else "cuda")
        self.deadline_s = time.monotonic() + budget_s
        self.results: dict[str, dict[str, Any]] = {}
        self.folder = Path(
            tempfile.mkdtemp(prefix="fulltilt-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True

    def note(self, job: str, name: str, value: Any) -> None:
        """Write a figure down at once."""
        self.results.setdefault(job, {})[name] = round(value, 4) if isinstance(value, float) else value
        print(f"{job:<11} {name:<34} {_show(value)}", flush=True)
        self.out.write_text(json.dumps(self.results, indent=1))

    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def has_time_for(self, seconds: float) -> bool:
        return self.smoke or self.left_s() > seconds

    def drain(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def rate(
        self,
        step: Callable[[Any], Any],
        batches: Callable[[], Iterable[Any]],
        size: Callable[[Any], int],
        seconds: float,
        *,
        warmup: int = 5,
    ) -> tuple[float, float]:
        """Samples per second over ``seconds`` of endless epochs of ``batches``, and host CPU use in percent."""
        seconds, warmup = (0.2, 1) if self.smoke else (seconds, warmup)
        stream = _endless(batches)
        try:
            for _ in range(warmup):
                step(next(stream))
            self.drain()
            psutil.cpu_percent()
            began, samples, steps = time.perf_counter(), 0, 0
            while time.perf_counter() - began < seconds:
                batch = next(stream)
                step(batch)
                samples += size(batch)
                steps += 1
                if steps % 32 == 0:
                    self.drain()  # bounds how far the host runs ahead, so that the clock stops near the real end
            self.drain()
            return samples / (time.perf_counter() - began), psutil.cpu_percent()
        finally:
            stream.close()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _endless(batches: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    while True:
        yield from batches()


def _show(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


# --------------------------------------------------------------------------- images


def _make_image(task: tuple[str, str | None, int, int, int]) -> None:
    from PIL import Image

    image_path, mask_path, width, height, seed = task
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 256, (height // 16, width // 16, 3), generator=generator, dtype=torch.uint8)
    image = Image.fromarray(coarse.numpy()).resize((width, height), Image.Resampling.BICUBIC)
    fine = torch.randint(0, 24, (height, width, 3), generator=generator, dtype=torch.uint8)
    pixels = torch.from_numpy(__import__("numpy").asarray(image).copy()) // 10 * 9 + fine
    Image.fromarray(pixels.numpy()).save(image_path, quality=90)
    if mask_path is not None:
        Image.fromarray((coarse[..., 0] > 128).to(torch.uint8).mul(255).numpy()).resize((width, height)).save(mask_path)


def make_images(folder: Path, count: int, width: int, height: int, *, masks: bool) -> list[tuple[str, str | None]]:
    pairs = [(str(folder / f"{n:06}.jpg"), str(folder / f"{n:06}.png") if masks else None) for n in range(count)]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(_make_image, [(*pair, width, height, n) for n, pair in enumerate(pairs)], chunksize=16))
    return pairs


class Images(Dataset[Any]):
    """Decoded and resized images as uint8, with a mask or with token ids. The deterministic part of a real data set."""

    def __init__(self, files: list[tuple[str, str | None]], size: int) -> None:
        self.files = files
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        from PIL import Image
        from torchvision.transforms.v2.functional import pil_to_tensor

        path, mask_path = self.files[index]
        with Image.open(path) as image:
            pixels = pil_to_tensor(image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR))
        if mask_path is None:
            tokens = torch.randint(1, 49000, (77,), generator=torch.Generator().manual_seed(index))
            tokens[-1] = 49407
            return pixels, tokens
        with Image.open(mask_path) as mask:
            return pixels, pil_to_tensor(mask.resize((self.size, self.size), Image.Resampling.NEAREST))


class StockImages(Images):
    """The same the usual way: flip, float and normalise per sample on the CPU."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        from torchvision.transforms.v2.functional import normalize

        pixels, other = super().__getitem__(index)
        flip = float(torch.rand(1)) < 0.5
        if flip:
            pixels = pixels.flip(-1)
        if other.ndim == 3:
            other = other.flip(-1) if flip else other
        return normalize(pixels.float() / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), other


def on_device(loader: DataLoader[Any], device: torch.device) -> Iterator[Any]:
    for batch in loader:
        yield [part.to(device, non_blocking=True) for part in batch]


def first_of(batch: Any) -> int:
    return len(batch[0])


def run_image_job(
    bench: Bench, job: str, files: Any, size: int, batch_size: int, step: Any, tiers: Iterable[str]
) -> None:
    """Compute-only, stock over worker counts, the first epoch, and every tier."""
    device = bench.device
    dataset, stock = Images(files, size), StockImages(files, size)
    real = [torch.stack(parts) for parts in zip(*(stock[i % len(stock)] for i in range(batch_size)), strict=True)]
    fixed = [part.to(device) for part in real]
    compute, _ = bench.rate(step, lambda: [fixed], first_of, 6, warmup=10)
    bench.note(job, "compute_only", compute)

    transforms = augment.Pipeline([augment.HorizontalFlip(), augment.Normalise()])
    options: dict[str, Any] = {
        "shuffle": True,
        "augment": transforms,
        "device": device,
        "drop_last": True,
        "cache_dir": bench.folder / "cache",
    }
    with feed.loader(dataset, batch_size, residency="auto", reserve_bytes=0, **options) as loader:
        for batch in loader.order.batches(0)[:1]:  # the augmentation is compiled before the clock starts
            transforms((fixed[0].to(torch.uint8)[: len(batch)], fixed[1][: len(batch)]), 0, 0, batch.to(device))
        began, samples = time.perf_counter(), 0
        for batch in loader:
            step(batch)
            samples += first_of(batch)
        bench.drain()
        bench.note(job, "first_epoch", samples / (time.perf_counter() - began))
        bench.note(job, "first_epoch_workers", loader.workers)
        if loader.tier in TIERS[:1] or bench.smoke:
            loader.fill()
            fed, cpu = bench.rate(step, lambda: loader, first_of, 6)
            bench.note(job, f"feed_{loader.tier}", fed)
            bench.note(job, f"feed_{loader.tier}_host_cpu_pct", cpu)
            bench.note(job, "fed_over_compute", fed / compute)

    best = 0.0
    for workers in bench.workers:
        if not bench.has_time_for(20):
            break
        stream = DataLoader(
            stock,
            batch_size,
            shuffle=True,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            drop_last=True,
            persistent_workers=workers > 0,
            prefetch_factor=2 if workers else None,
        )
        rate, cpu = bench.rate(step, lambda stream=stream: on_device(stream, device), first_of, 6, warmup=4)
        bench.note(job, f"stock_{workers}_workers", rate)
        best = max(best, rate)
        del stream
    if best:
        bench.note(job, "best_stock", best)
        bench.note(job, "first_epoch_over_best_stock", bench.results[job]["first_epoch"] / best)
        if "fed_over_compute" in bench.results[job]:
            bench.note(job, "fed_over_best_stock", bench.results[job]["fed_over_compute"] * compute / best)

    for tier in tiers:
        if not bench.has_time_for(15) or f"feed_{tier}" in bench.results[job]:
            continue
        if tier in ("vram", "pinned") and device.type != "cuda":
            continue
        try:
            with feed.loader(dataset, batch_size, residency=tier, **options) as loader:
                loader.fill()
                fed, cpu = bench.rate(step, lambda loader=loader: loader, first_of, 5)
            bench.note(job, f"feed_{tier}", fed)
            bench.note(job, f"feed_{tier}_host_cpu_pct", cpu)
            bench.note(job, f"{tier}_over_compute", fed / compute)
        except Exception as error:
            bench.note(job, f"feed_{tier}_failed", f"{type(error).__name__}: {str(error)[:200]}")
    after, _ = bench.rate(step, lambda: [fixed], first_of, 3)
    bench.note(job, "compute_only_at_the_end", after)
    for workers in bench.workers:  # how many workers the feed itself wants, where the samples are drawn anew
        if bench.has_time_for(12):
            with feed.loader(dataset, batch_size, residency="none", num_workers=workers, **options) as loader:
                rate, _ = bench.rate(step, lambda loader=loader: loader, first_of, 4)
            bench.note(job, f"feed_none_{workers}_workers", rate)


def trainer(
    model: nn.Module, loss_of: Callable[[nn.Module, Any], torch.Tensor], device: torch.device
) -> Callable[[Any], None]:
    """One training step in bf16 with AdamW; nothing in it waits for the GPU."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def step(batch: Any) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class Segmenter(nn.Module):
    """EdgeNeXt features and a small decoder, as the COD recipe has them in outline."""

    def __init__(self, backbone: str) -> None:
        super().__init__()
        import timm

        self.backbone = timm.create_model(backbone, pretrained=False, features_only=True)
        self.lateral = nn.ModuleList(nn.Conv2d(width, 64, 1) for width in self.backbone.feature_info.channels())
        self.head = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.backbone(images)
        size = features[0].shape[-2:]
        together = sum(
            nn.functional.interpolate(lateral(feature), size=size, mode="bilinear")
            for lateral, feature in zip(self.lateral, features, strict=True)
        )
        return nn.functional.interpolate(self.head(together), size=images.shape[-2:], mode="bilinear")


def run_cod(bench: Bench) -> None:
    size, batch_size, count = (64, 4, 24) if bench.smoke else (384, 64, 2048)
    files = make_images(bench.folder, count, *((96, 64) if bench.smoke else (800, 600)), masks=True)
    model = Segmenter("edgenext_xx_small" if bench.smoke else "edgenext_base").to(bench.device)
    model = model.to(memory_format=torch.channels_last)
    compiled = model if bench.smoke else torch.compile(model)

    def loss_of(network: nn.Module, batch: Any) -> torch.Tensor:
        images, masks = batch
        target = (masks > 127).float()
        return nn.functional.binary_cross_entropy_with_logits(network(images).float(), target)

    step = trainer(compiled, loss_of, bench.device)
    run_image_job(bench, "cod", files, size, batch_size, step, TIERS)


def run_clip(bench: Bench) -> None:
    from transformers import CLIPConfig, CLIPModel

    if bench.smoke:
        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = CLIPConfig(
            text_config=small, vision_config={**small, "image_size": 32, "patch_size": 16}, projection_dim=16
        )
    else:
        config = CLIPConfig()  # ViT-B/32
    size, count = (32, 24) if bench.smoke else (224, 6144)
    files = make_images(bench.folder, count, *((48, 48) if bench.smoke else (400, 300)), masks=False)
    model = CLIPModel(config).to(bench.device)

    def loss_of(network: nn.Module, batch: Any) -> torch.Tensor:
        images, tokens = batch
        return network(input_ids=tokens, pixel_values=images, return_loss=True).loss

    for batch_size in (4, 8) if bench.smoke else (256, 1024):
        if not bench.has_time_for(30):
            return
        tiers = TIERS if batch_size in (4, 256) else TIERS[:2]
        job = f"clip_b{batch_size}"
        workers, bench.workers = bench.workers, bench.workers if batch_size in (4, 256) else bench.workers[-2:-1]
        run_image_job(bench, job, files, size, batch_size, trainer(model, loss_of, bench.device), tiers)
        bench.workers = workers


# --------------------------------------------------------------------------- text


class PaddedTexts(Dataset[Any]):
    def __init__(self, sequences: list[list[int]]) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return self.sequences[index], index % 2


def pad_to(
    length: int | None,
) -> Callable[[list[tuple[list[int], int]]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    def collate(samples: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        width = length or max(len(ids) for ids, _ in samples)
        ids = torch.zeros(len(samples), width, dtype=torch.int64)
        for row, (sequence, _) in enumerate(samples):
            ids[row, : len(sequence)] = torch.tensor(sequence)
        return ids, (ids != 0).long(), torch.tensor([label for _, label in samples])

    return collate


def run_text(bench: Bench) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    batch_size, count = (8, 100) if bench.smoke else (512, 60_000)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(**(small if bench.smoke else {}))).to(bench.device)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.randn(count, generator=generator) * 0.55 + 2.9).round().clamp(4, 128).int().tolist()
    sequences = [torch.randint(5, 30_000, (n,), generator=generator).tolist() for n in lengths]
    labels = [number % 2 for number in range(count)]
    bench.note("text", "mean_tokens", sum(lengths) / count)

    def loss_of(network: nn.Module, batch: Any) -> torch.Tensor:
        return network(**batch).loss

    step = trainer(model, loss_of, bench.device)

    def size(batch: Any) -> int:
        return len(batch["labels"])

    loader = feed.text(sequences, labels, batch_size=batch_size, device=bench.device, drop_last=True)
    ready = list(loader)  # the same batches, already assembled: what the steps alone cost
    compute, _ = bench.rate(step, lambda: ready, size, 8, warmup=min(len(ready), 40))
    bench.note("text", "compute_only", compute)
    ready = []
    fed, cpu = bench.rate(step, lambda: loader, size, 8)
    bench.note("text", "feed_buckets", fed)
    bench.note("text", "feed_buckets_host_cpu_pct", cpu)
    bench.note("text", "fed_over_compute", fed / compute)
    bench.note("text", "padding_waste_buckets", loader.padding_waste)
    order = torch.split(torch.randperm(count, generator=generator), batch_size)
    bench.note("text", "padding_waste_dynamic", padding_waste(torch.tensor(lengths), order))
    bench.note("text", "padding_waste_pad_to_128", 1 - sum(lengths) / (128 * count))
    for name, width in (("pad_to_128", 128), ("dynamic_padding", None)):
        stock = DataLoader(
            PaddedTexts(sequences),
            batch_size,
            shuffle=True,
            num_workers=4,
            collate_fn=pad_to(width),
            drop_last=True,
            pin_memory=bench.device.type == "cuda",
            persistent_workers=True,
        )

        def batches(stock: DataLoader[Any] = stock) -> Iterator[Any]:
            for parts in on_device(stock, bench.device):
                yield dict(zip(("input_ids", "attention_mask", "labels"), parts, strict=True))

        rate, _ = bench.rate(step, batches, size, 7)
        bench.note("text", name, rate)
        bench.note("text", f"fed_over_{name}", fed / rate)
        del stock


# --------------------------------------------------------------------------- HDF5


class SampleBySample(Dataset[Any]):
    """Guide 5's way: ``h5[i]`` in each worker."""

    def __init__(self, path: str, count: int) -> None:
        self.path, self.count = path, count
        self.file: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.file is None:
            import h5py

            self.file = h5py.File(self.path, "r")
        return torch.from_numpy(self.file["x"][index]), torch.tensor(self.file["y"][index])


def run_hdf5(bench: Bench) -> None:
    import h5py

    batch_size, count = (64, 1024) if bench.smoke else (8192, 524_288)
    path = str(bench.folder / "windows.h5")
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (count, 64, 16), "f4", chunks=(256, 64, 16))
        y = file.create_dataset("y", (count,), "f4", chunks=(8192,) if count > 8192 else None)
        for start in range(0, count, 65_536):
            stop = min(count, start + 65_536)
            x[start:stop] = torch.randn(stop - start, 64, 16).numpy()
            y[start:stop] = torch.randint(0, 2, (stop - start,)).float().numpy()
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

    step = trainer(compiled, loss_of, bench.device)
    fixed = [(torch.randn(batch_size, 64, 16, device=bench.device), torch.zeros(batch_size, device=bench.device))]
    compute, _ = bench.rate(step, lambda: fixed, first_of, 5, warmup=20)
    bench.note("hdf5", "compute_only", compute)
    options: dict[str, Any] = {"drop_last": True, "device": bench.device}
    resident = "ram" if bench.smoke else "vram"
    with feed.hdf5(path, ["x", "y"], batch_size, residency=resident, **options) as loader:
        began = time.perf_counter()
        loader.fill()
        bench.drain()
        bench.note("hdf5", "fill_s", time.perf_counter() - began)
        fed, cpu = bench.rate(step, lambda: loader, first_of, 6, warmup=20)
    bench.note("hdf5", f"feed_{resident}", fed)
    bench.note("hdf5", f"feed_{resident}_host_cpu_pct", cpu)
    bench.note("hdf5", "fed_over_compute", fed / compute)
    with feed.hdf5(path, ["x", "y"], batch_size, residency="none", mixing_rows=count // 4, **options) as loader:
        streamed, cpu = bench.rate(step, lambda: loader, first_of, 6)
        bench.note("hdf5", "feed_streamed", streamed)
        bench.note("hdf5", "feed_streamed_mixing_samples", loader.mixing)
    for name, workers, prefetch in (("guide_5", 8, 16), ("guide_5_before", 4, 8)):
        if not bench.has_time_for(30):
            break
        stock = DataLoader(
            SampleBySample(path, count),
            batch_size,
            shuffle=True,
            num_workers=1 if bench.smoke else workers,
            prefetch_factor=prefetch,
            pin_memory=bench.device.type == "cuda",
            persistent_workers=True,
            drop_last=True,
        )
        rate, _ = bench.rate(step, lambda stock=stock: on_device(stock, bench.device), first_of, 12, warmup=workers + 2)
        bench.note("hdf5", name, rate)
        bench.note("hdf5", f"fed_over_{name}", fed / rate)
        del stock
    again, _ = bench.rate(step, lambda: fixed, first_of, 3)
    bench.note("hdf5", "compute_only_at_the_end", again)


# --------------------------------------------------------------------------- running


RUN = {"cod": run_cod, "clip": run_clip, "text": run_text, "hdf5": run_hdf5}


def child(arguments: argparse.Namespace) -> int:
    workers = [int(number) for number in arguments.workers.split(",")]
    bench = Bench(Path(arguments.out), arguments.budget_s, smoke=arguments.smoke, workers=workers)
    try:
        RUN[arguments.child](bench)
    except Exception as error:
        traceback.print_exc()
        bench.note(arguments.child, "failed", f"{type(error).__name__}: {str(error)[:300]}")
        return 1
    finally:
        bench.close()
    return 0


def versions() -> dict[str, Any]:
    import importlib.metadata

    found: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count(), "workers": default_workers()}
    for package in ("torch", "torchvision", "timm", "transformers", "h5py", "pillow"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return found


def table(jobs: dict[str, dict[str, Any]]) -> str:
    """Rates of each job beside its compute-only rate, then the targets."""
    out = io.StringIO()
    print(f"\n{'job':<11} {'what':<26} {'samples/s':>14} {'of compute-only':>16}", file=out)
    for job, figures in jobs.items():
        compute = figures.get("compute_only")
        for name, value in figures.items():
            is_rate = isinstance(value, float) and value > 0 and not name.endswith(("_pct", "fill_s"))
            is_rate = is_rate and not any(part in name for part in ("_over_", "waste", "mean_", "mixing"))
            if is_rate or name in ("compute_only", "first_epoch", "best_stock") or name.startswith("stock_"):
                share = f"{value / compute:>15.1%}" if compute and isinstance(value, float) else ""
                print(f"{job:<11} {name:<26} {_show(value):>14} {share:>16}", file=out)
    print(f"\n{'job':<11} {'target':<26} {'wanted':>14} {'measured':>16}", file=out)
    for job, targets in TARGETS.items():
        for name, wanted in targets.items():
            measured = jobs.get(job, {}).get(name)
            if job in jobs:
                verdict = (
                    "not measured" if measured is None else f"{measured:.3f} {'ok' if measured >= wanted else 'MISSED'}"
                )
                print(f"{job:<11} {name:<26} {wanted:>14} {verdict:>16}", file=out)
    return out.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), help="comma-separated: " + ", ".join(JOBS))
    parser.add_argument("--out", default="feed-bench.json", help="where the figures are written after each job")
    parser.add_argument("--workers", default="4,8,12,16", help="worker counts of the stock DataLoader")
    parser.add_argument("--budget-s", type=float, default=None, help="seconds for each job (default: its own)")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--child", choices=JOBS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    chosen = [job for job in arguments.jobs.split(",") if job]
    if unknown := set(chosen) - set(JOBS):
        parser.error(f"unknown jobs: {', '.join(sorted(unknown))}")
    if arguments.smoke:
        arguments.workers = "1"
    result: dict[str, Any] = {"versions": versions(), "command": sys.argv, "jobs": {}, "problems": {}}
    for job in chosen:
        budget = arguments.budget_s or BUDGET_S[job]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "job.json"
            command = [sys.executable, __file__, "--child", job, "--out", str(out), "--budget-s", str(budget)]
            command += ["--workers", arguments.workers, *(["--smoke"] if arguments.smoke else [])]
            # A session of its own, so that a job that overruns is ended with all of its workers.
            process = subprocess.Popen(command, start_new_session=True)
            try:
                process.wait(budget + 30)
                if process.returncode:
                    result["problems"][job] = f"exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                result["problems"][job] = f"ran past {budget + 30:.0f} s"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
            if out.exists():
                result["jobs"].update(json.loads(out.read_text()))
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["jobs"]))
    for job, problem in result["problems"].items():
        print(f"{job}: {problem}")
    print(f"figures: {arguments.out}")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
