"""Augmentation of whole batches: the feed's kernels against torchvision v2 and kornia, in milliseconds a batch.

    python bench/augment.py --out augment.json       under 90 s on an H200
    python bench/augment.py --smoke                  tiny batches on the CPU: does the benchmark itself work?

"each sample its own" is what training needs. torchvision v2 draws once for a whole batch tensor, so that it has to be
called sample by sample for it; called once for the batch it does less, so that time is only the cost of its kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from children import drain, process_start_s, versions
from feedbench.images import MEAN, STD

from fulltilt.feed import augment

DEGREES, SHIFT, SCALE = 15.0, (0.1, 0.1), (0.9, 1.1)
JITTER = (0.2, 0.2, 0.2, 0.05)
Call = Callable[[torch.Tensor, torch.Tensor], Any]


def ours(chain: str, size: int, device: torch.device, *, compiled: bool) -> Call:
    """The feed's own, as the loader calls it: numbers for each sample from (seed, epoch, index)."""
    parts: dict[str, list[Any]] = {
        "flip": [augment.HorizontalFlip()],
        "resized crop": [augment.RandomResizedCrop(size, size)],
        "affine": [augment.Affine(DEGREES, SHIFT, SCALE)],
        "jitter": [augment.ColourJitter(*JITTER)],
    }
    whole = [parts[name][0] for name in ("flip", "affine", "jitter")]
    pipeline = augment.Pipeline(
        [*whole, augment.Normalise(MEAN, STD)] if chain == "whole" else parts[chain], image=0, mask=1, compile=compiled
    )
    state = {"epoch": 0}

    def call(images: torch.Tensor, masks: torch.Tensor) -> Any:
        state["epoch"] += 1
        return pipeline((images, masks), 0, state["epoch"], torch.arange(len(images), device=device))

    return call


def torchvisions(chain: str, size: int, *, per_sample: bool) -> Call:
    """torchvision v2 on tensors of the device, image and mask together."""
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    to_float = v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)
    parts = {
        "flip": [v2.RandomHorizontalFlip()],
        "resized crop": [v2.RandomResizedCrop(size, antialias=False), to_float],
        "affine": [v2.RandomAffine(DEGREES, SHIFT, SCALE, interpolation=v2.InterpolationMode.BILINEAR), to_float],
        "jitter": [v2.ColorJitter(*JITTER), to_float],
    }
    normalise = v2.Normalize(list(MEAN), list(STD))
    whole = [parts["flip"][0], parts["affine"][0], parts["jitter"][0], to_float, normalise]
    transform = v2.Compose(whole if chain == "whole" else parts[chain])

    def call(images: torch.Tensor, masks: torch.Tensor) -> Any:
        if not per_sample:
            return transform(tv_tensors.Image(images), tv_tensors.Mask(masks))
        pairs = zip(images, masks, strict=True)
        done = [transform(tv_tensors.Image(image), tv_tensors.Mask(mask)) for image, mask in pairs]
        return torch.stack([image for image, _ in done]), torch.stack([mask for _, mask in done])

    return call


def kornias(chain: str, size: int) -> Call:
    """kornia's own containers: each sample its own numbers, masks by nearest."""
    import kornia.augmentation as K  # noqa: N812 - as its documentation has it

    parts = {
        "flip": [K.RandomHorizontalFlip()],
        "resized crop": [K.RandomResizedCrop((size, size), scale=(0.08, 1.0))],
        "affine": [K.RandomAffine(DEGREES, SHIFT, SCALE, p=1.0)],
        "jitter": [K.ColorJiggle(*JITTER, p=1.0)],
    }
    normalise = K.Normalize(list(MEAN), list(STD))
    whole = [parts["flip"][0], parts["affine"][0], parts["jitter"][0], normalise]
    transform = K.AugmentationSequential(*(whole if chain == "whole" else parts[chain]), data_keys=["input", "mask"])

    def call(images: torch.Tensor, masks: torch.Tensor) -> Any:
        return transform(images.float() / 255, masks.float())

    return call


def milliseconds(call: Callable[[], Any], device: torch.device, least_s: float) -> float:
    """The median time of a batch over blocks of calls, drained at both ends; a slow call is a block of its own."""

    def seconds(calls: int) -> float:
        drain(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        drain(device)
        return (time.perf_counter() - began) / calls

    seconds(2)  # compiles, and allocates
    calls = max(1, min(10, int(0.05 / seconds(1))))
    blocks = list[float]()
    stop = time.perf_counter() + least_s
    while time.perf_counter() < stop or len(blocks) < 3:
        blocks.append(seconds(calls) * 1000)
    return statistics.median(blocks)


def main() -> int:
    """Print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="augment-bench.json", help="where the figures are written after each row")
    parser.add_argument("--smoke", action="store_true", help="tiny batches on the CPU")
    parser.add_argument("--budget-s", type=float, default=70.0, help="rows that begin later are left out")
    arguments = parser.parse_args()
    began = process_start_s()
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.smoke else "cpu")
    least_s = 0.0 if arguments.smoke else 0.25
    result: dict[str, Any] = {"versions": versions(("torch", "torchvision", "kornia")), "command": sys.argv, "rows": []}
    rows = [("whole", 64, 384), ("whole", 256, 224)]
    rows += [(chain, 64, 384) for chain in ("resized crop", "jitter", "affine", "flip")]
    for chain, batch_size, size in [(c, 4, 32) for c, _, _ in rows[1:]] if arguments.smoke else rows:
        if time.monotonic() - began > arguments.budget_s:
            break
        images = torch.randint(0, 256, (batch_size, 3, size, size), dtype=torch.uint8, device=device)
        masks = torch.randint(0, 2, (batch_size, 1, size, size), dtype=torch.uint8, device=device)
        calls: dict[str, Callable[[], Call]] = {
            "ours": partial(ours, chain, size, device, compiled=device.type == "cuda"),
            "ours_eager": partial(ours, chain, size, device, compiled=False),
            "torchvision_per_sample": partial(torchvisions, chain, size, per_sample=True),
            "torchvision_one_draw": partial(torchvisions, chain, size, per_sample=False),
            "kornia": partial(kornias, chain, size),
        }
        row: dict[str, Any] = {"chain": chain, "batch_size": batch_size, "size": size}
        for name, make in calls.items():
            try:
                row[name] = round(milliseconds(partial(make(), images, masks), device, least_s), 3)
            except ImportError as error:
                row[name] = None
                row[f"{name}_absent"] = str(error)
            except Exception as error:
                row[name] = None
                row[f"{name}_failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[-1500:]}"
        result["rows"].append(row)
        print(_line(row) if len(result["rows"]) > 1 else f"{_head()}\n{_line(row)}", flush=True)
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    print(f"ms a batch, on {result['versions']['gpu'] or 'the CPU'}; figures: {arguments.out}")
    return 0


NAMES = ("ours", "ours_eager", "kornia", "torchvision_per_sample", "torchvision_one_draw")


def _head() -> str:
    heads = ("ours", "ours, eager", "kornia", "tv per sample", "tv one draw")
    return f"{'chain':<14}{'batch':>6}{'px':>5}" + "".join(f"{head:>16}" for head in heads)


def _line(row: dict[str, Any]) -> str:
    cells = (f"{row[name]:>16.2f}" if row[name] is not None else f"{'–':>16}" for name in NAMES)
    return f"{row['chain']:<14}{row['batch_size']:>6}{row['size']:>5}{''.join(cells)}"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.exit(main())
