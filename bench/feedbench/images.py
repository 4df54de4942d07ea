"""COD and CLIP: JPEG files, every tier, the stock DataLoader over worker counts, peers on the same files."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from feedbench import peers
from feedbench.measuring import LEAST_ROUNDS, WARM_UP_ROUNDS, Bench, Step, first_of, on_device, stock_loader, trainer
from fulltilt import feed
from fulltilt.feed import augment
from fulltilt.feed.tiers import Tier
from fulltilt.train.cuda_graphs import EAGER_FIRST

TIERS: tuple[Tier, ...] = ("vram", "disk", "pinned", "ram", "none")  # in the order of what has a target
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# --------------------------------------------------------------------------- files


def _make_image(task: tuple[str, str | None, int, int, int]) -> None:
    import numpy
    from PIL import Image

    image_path, mask_path, width, height, seed = task
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 256, (height // 16, width // 16, 3), generator=generator, dtype=torch.uint8)
    image = Image.fromarray(coarse.numpy()).resize((width, height), Image.Resampling.BICUBIC)
    fine = torch.randint(0, 24, (height, width, 3), generator=generator, dtype=torch.uint8)
    pixels = torch.from_numpy(numpy.asarray(image).copy()) // 10 * 9 + fine
    Image.fromarray(pixels.numpy()).save(image_path, quality=90)
    if mask_path is not None:
        Image.fromarray((coarse[..., 0] > 128).to(torch.uint8).mul(255).numpy()).resize((width, height)).save(mask_path)


# Different pictures; a list of files repeats them. Every decode is done all the same, and they all lie in memory.
DIFFERENT = 256


def make_images(folder: Path, count: int, width: int, height: int, *, masks: bool) -> list[tuple[str, str | None]]:
    """Smooth colours with noise as JPEG of quality 90, and masks as PNG; each file is in the list several times."""
    different = min(count, DIFFERENT)
    pairs = [(str(folder / f"{n:06}.jpg"), str(folder / f"{n:06}.png") if masks else None) for n in range(different)]
    # One thread each: OpenMP in a child whose parent has used it waits for threads that the fork did not copy.
    with ProcessPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(_make_image, [(*pair, width, height, n) for n, pair in enumerate(pairs)], chunksize=4))
    return pairs * (count // different)


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

        with Image.open(self.files[index][0]) as image:
            pixels = pil_to_tensor(image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR))
        return pixels, self.other(index)

    def other(self, index: int) -> torch.Tensor:
        from PIL import Image
        from torchvision.transforms.v2.functional import pil_to_tensor

        mask_path = self.files[index][1]
        if mask_path is None:
            tokens = torch.randint(1, 49000, (77,), generator=torch.Generator().manual_seed(index))
            tokens[-1] = 49407
            return tokens
        with Image.open(mask_path) as mask:
            pixels: torch.Tensor = pil_to_tensor(mask.resize((self.size, self.size), Image.Resampling.NEAREST))
        return pixels


class PerSample:
    """Augmentation the usual way: torchvision v2 on each sample, picture and mask together, then normalised."""

    def __init__(self, chain: Sequence[Any]) -> None:
        from torchvision.transforms import v2

        self.chain = v2.Compose(chain)
        self.normalise = v2.Normalize(list(MEAN), list(STD))

    def __call__(self, pixels: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from torchvision import tv_tensors

        image = tv_tensors.Image(pixels)
        image, other = self.chain(image, tv_tensors.Mask(other) if other.ndim == 3 else other)
        return self.normalise(image.as_subclass(torch.Tensor).float() / 255), other.as_subclass(torch.Tensor)


class StockImages(Images):
    """The same, augmented in the worker that fetches it."""

    def __init__(self, files: list[tuple[str, str | None]], size: int, augmented: PerSample) -> None:
        super().__init__(files, size)
        self.augmented = augmented

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.augmented(*super().__getitem__(index))


class Chain(NamedTuple):
    """The same augmentation twice: torchvision's for each sample, the feed's for whole batches on the device."""

    per_sample: Sequence[Any]
    per_batch: Sequence[Any]


def flips() -> Chain:
    """Left or right."""
    from torchvision.transforms import v2

    return Chain([v2.RandomHorizontalFlip()], [augment.HorizontalFlip()])


def cod_chain() -> Chain:
    """What the cod recipe does to its pictures and masks."""
    from torchvision.transforms import v2

    degrees, shift, scale, jitter = 12, (0.06, 0.06), (0.85, 1.25), (0.2, 0.2, 0.2)
    affine = v2.RandomAffine(degrees, shift, scale, interpolation=v2.InterpolationMode.BILINEAR)
    return Chain(
        [v2.RandomHorizontalFlip(), affine, v2.ColorJitter(*jitter)],
        [augment.HorizontalFlip(), augment.Affine(degrees, shift, scale), augment.ColourJitter(*jitter)],
    )


# --------------------------------------------------------------------------- one job


class ImageJob:
    """Files, model step and batch size of one row; each method measures one thing about it."""

    def __init__(
        self, bench: Bench, name: str, files: Any, size: int, batch_size: int, step: Step, chain: Chain
    ) -> None:
        self.bench, self.name, self.batch_size, self.step = bench, name, batch_size, step
        # Stock loaders stand still at the end of an epoch; theirs is longer than what is measured of them.
        self.dataset, self.stock = Images(files, size), StockImages(files * 32, size, PerSample(chain.per_sample))
        self.transforms = augment.Pipeline([*chain.per_batch, augment.Normalise(MEAN, STD)])
        self.options: dict[str, Any] = {
            "shuffle": True,
            "augment": self.transforms,
            "device": bench.device,
            "drop_last": True,
            "cache_dir": bench.cache_dir,
            "cache_key": f"bench {name}",
        }
        few = [self.stock[number] for number in range(8)]
        samples = [few[number % len(few)] for number in range(batch_size)]
        self.fixed = [torch.stack(parts).to(bench.device) for parts in zip(*samples, strict=True)]
        self.compute = 0.0

    def resident(self) -> None:
        """The first epoch while the cache fills, then the fastest tier against compute-only."""
        bench = self.bench
        # Model and augmentation are compiled, and the step is recorded, before any clock starts.
        numbers = torch.arange(self.batch_size, device=bench.device)
        for _ in range(EAGER_FIRST + 2):
            self.step(self.fixed)
            self.transforms((self.fixed[0].to(torch.uint8), self.fixed[1]), 0, 0, numbers)
        bench.drain()
        bench.note(self.name, "ready_after_s", round(time.monotonic() - bench.began_s, 1))
        tier: Tier = "ram" if bench.device.type == "cpu" else "vram"
        with feed.loader(self.dataset, self.batch_size, residency=tier, **self.options) as loader:
            bench.note(self.name, "first_epoch", bench.epoch_rate(self.step, loader, first_of))
            bench.note(self.name, "first_epoch_workers", loader.workers)
            loader.fill()  # what drop_last left out
            self.compute = bench.against_compute(
                self.name, f"feed_{tier}", self.step, lambda: [self.fixed], lambda: loader, first_of
            )

    def stock_rates(self, counts: Iterable[int], seconds: float) -> None:
        """torch's DataLoader over worker counts: its first epoch, then its steady state."""
        best = best_first = 0.0
        for workers in counts:
            rounds_s = (WARM_UP_ROUNDS + LEAST_ROUNDS) * workers * self.batch_size / self.compute
            if not self.bench.has_time_for(max(2 * seconds, rounds_s) + 6):
                self.bench.note(self.name, f"stock_{workers}_workers", "no time left")
                continue
            loader = stock_loader(self.stock, self.batch_size, workers, self.bench.device)
            first, rate = self.bench.first_and_steady_rate(
                self.step,
                functools.partial(on_device, loader, self.bench.device),
                first_of,
                len(self.dataset),
                seconds,
                workers,
            )
            del loader
            self.bench.note(self.name, f"stock_{workers}_workers", rate)
            self.bench.note(self.name, f"stock_{workers}_workers_first_epoch", first)
            best, best_first = max(best, rate), max(best_first, first)
            figures = self.bench.results[self.name]
            self.bench.note(self.name, "best_stock", best)
            self.bench.note(self.name, "first_epoch_over_best_stock_first", figures["first_epoch"] / best_first)
            self.bench.note(self.name, "fed_over_best_stock", figures["fed_over_compute"] * self.compute / best)

    def tier(self, tier: Tier, seconds: float) -> None:
        """One tier, filled, in steady state."""
        absent = tier in ("vram", "pinned") and self.bench.device.type != "cuda"
        if absent or f"feed_{tier}" in self.bench.results[self.name]:
            return
        if not self.bench.has_time_for(seconds + 6):
            self.bench.note(self.name, f"feed_{tier}", "no time left")
            return
        try:
            with feed.loader(self.dataset, self.batch_size, residency=tier, **self.options) as loader:
                loader.fill()
                workers = loader.workers if tier == "none" else 1
                fed, cpu = self.bench.rate(self.step, lambda: loader, first_of, seconds, workers=workers)
            self.bench.note(self.name, f"feed_{tier}", fed)
            self.bench.note(self.name, f"feed_{tier}_host_cpu_pct", cpu)
            self.bench.note(self.name, f"{tier}_over_compute", fed / self.compute)
        except Exception as error:
            self.bench.note(self.name, f"feed_{tier}_failed", f"{type(error).__name__}: {str(error)[:200]}")

    def peers(self, seconds: float) -> None:
        """Other projects' loaders on the same files, where they are installed."""
        for peer in peers.PEERS:
            if not self.bench.has_time_for(seconds + 10):
                self.bench.note(self.name, f"peer_{peer.__name__}", "no time left")
                continue
            try:
                with peer(self.stock, self.batch_size, self.bench) as (batches, workers):
                    rate, _ = self.bench.rate(self.step, batches, first_of, seconds, workers=workers)
                self.bench.note(self.name, f"peer_{peer.__name__}", rate)
            except ImportError as error:
                self.bench.note(self.name, f"peer_{peer.__name__}_absent", str(error))
            except Exception as error:
                self.bench.note(
                    self.name, f"peer_{peer.__name__}_failed", f"{type(error).__name__}: {str(error)[:200]}"
                )


# --------------------------------------------------------------------------- COD


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
    """COD: EdgeNeXt-base, 384 px, batch 64, compiled, augmented as the recipe does."""
    size, batch_size, count = (64, 4, 24) if bench.smoke else (384, 64, 2048)
    files = make_images(bench.folder, count, *((96, 64) if bench.smoke else (800, 600)), masks=True)
    model = Segmenter("edgenext_xx_small" if bench.smoke else "edgenext_base").to(bench.device)
    model = model.to(memory_format=torch.channels_last)
    compiled = model if bench.smoke else torch.compile(model)

    def loss_of(network: nn.Module, batch: Any) -> torch.Tensor:
        images, masks = batch
        # One memory format for every loader: a compiled model would be compiled again for each other one.
        outputs = network(images.contiguous(memory_format=torch.channels_last))
        return nn.functional.binary_cross_entropy_with_logits(outputs.float(), (masks > 127).float())

    step = trainer(compiled, loss_of)
    job = ImageJob(bench, "cod", files, size, batch_size, step, flips() if bench.flips_only else cod_chain())
    job.resident()
    if "tiers" in bench.parts:
        job.tier("disk", 3.0)
    if "stock" in bench.parts:
        job.stock_rates(bench.workers, 3.0)
    if "peers" in bench.parts:
        job.peers(3.5)
    if "tiers" in bench.parts:
        for tier in TIERS:
            job.tier(tier, 3.0)


# --------------------------------------------------------------------------- CLIP


def clip_model(small: bool) -> nn.Module:
    """ViT-B/32 with random weights, or a tiny one."""
    from transformers import CLIPConfig, CLIPModel

    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**tiny, "image_size": 32, "patch_size": 16}
    config = CLIPConfig(text_config=tiny, vision_config=vision, projection_dim=16) if small else CLIPConfig()
    model: nn.Module = CLIPModel(config)
    return model


def clip_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model's own, over pictures and token ids."""
    images, tokens = batch
    loss: torch.Tensor = model(input_ids=tokens, pixel_values=images.contiguous(), return_loss=True).loss
    return loss


def run_clip(bench: Bench) -> None:
    """CLIP ViT-B/32, 224 px, batches of 256 and 1024."""
    size, count = (32, 24) if bench.smoke else (224, 6144)
    files = make_images(bench.folder, count, *((48, 48) if bench.smoke else (400, 300)), masks=False)
    model = clip_model(bench.smoke).to(bench.device)
    step = trainer(model, clip_loss)
    jobs = [
        ImageJob(bench, f"clip_b{batch_size}", files, size, batch_size, step, flips())
        for batch_size in ((4, 8) if bench.smoke else (256, 1024))
    ]
    for job in jobs:
        job.resident()
    if "tiers" in bench.parts:
        for job in jobs:
            for tier in TIERS:
                job.tier(tier, 3.0)
    if "stock" in bench.parts:
        for job in jobs:
            job.stock_rates(bench.workers, 3.0)
