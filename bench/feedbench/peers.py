"""Other projects' loaders over the same files, each with the decoding and augmentation of the stock data set.

Missing here: DALI (its wheel is 190 MB, more than can be carried to a machine without a network) and FFCV (no wheel;
its newest release compiles against OpenCV and libjpeg-turbo at installation).
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from feedbench.measuring import Batches, Bench

SHARDS = 32

# The batches of an epoch, and how many come together.
Peer = tuple[Batches, int]


@contextmanager
def spdl(stock: Any, batch_size: int, bench: Bench) -> Iterator[Peer]:
    """SPDL's pipeline: one thread pool decodes, one stage stacks and copies to the device."""
    from spdl.pipeline import PipelineBuilder

    threads = 2 if bench.smoke else os.cpu_count() or 8

    def indices() -> Iterator[int]:
        while True:
            yield from torch.randperm(len(stock)).tolist()

    def to_device(samples: list[Any]) -> list[torch.Tensor]:
        parts = [torch.stack(part) for part in zip(*samples, strict=True)]
        if bench.device.type == "cuda":
            parts = [part.pin_memory() for part in parts]
        return [part.to(bench.device, non_blocking=True) for part in parts]

    pipeline = (
        PipelineBuilder()
        .add_source(indices())
        .pipe(stock.__getitem__, concurrency=threads)
        .aggregate(batch_size)
        .pipe(to_device)
        .add_sink(3)
        .build(num_threads=threads + 1)
    )
    with pipeline.auto_stop():
        yield lambda: pipeline, 1


@contextmanager
def webdataset(stock: Any, batch_size: int, bench: Bench) -> Iterator[Peer]:
    """WebDataset: the files in tar shards, read in sequence by 8 workers, shuffled within a buffer."""
    import webdataset as wds

    shards = _shards(stock, bench.folder)
    workers = 1 if bench.smoke else 8
    dataset = (
        wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
        .shuffle(256)
        .map(_Decode(stock.size, stock.augmented))
        .batched(batch_size, partial=False)
    )
    loader = wds.WebLoader(
        dataset, batch_size=None, num_workers=workers, pin_memory=bench.device.type == "cuda", persistent_workers=True
    )

    def batches() -> Iterator[Any]:
        for parts in loader:
            yield [part.to(bench.device, non_blocking=True) for part in parts]

    yield batches, workers


class _Decode:
    """A tar entry as the stock data set's sample."""

    def __init__(self, size: int, augmented: Any) -> None:
        self.size, self.augmented = size, augmented

    def __call__(self, entry: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        from PIL import Image
        from torchvision.transforms.v2.functional import pil_to_tensor

        with Image.open(io.BytesIO(entry["jpg"])) as image:
            pixels = pil_to_tensor(image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR))
        with Image.open(io.BytesIO(entry["png"])) as mask:
            other = pil_to_tensor(mask.resize((self.size, self.size), Image.Resampling.NEAREST))
        augmented: tuple[torch.Tensor, torch.Tensor] = self.augmented(pixels, other)
        return augmented


def _shards(stock: Any, folder: Path) -> list[str]:
    names = [str(folder / f"shard-{number:03}.tar") for number in range(SHARDS)]
    for number, name in enumerate(names):
        with tarfile.open(name, "w") as shard:
            for pair in stock.files[number::SHARDS]:
                for path in pair:
                    shard.add(path, Path(path).name)
    return names


PEERS = (spdl, webdataset)
