"""A job to be tuned, written as people write them: JPEG files, a DataLoader without workers, a network, AdamW.

    python bench/tunebench/job.py FOLDER [--batch-size 64] [--size 384]

It knows nothing of Fulltilt. On a GPU the network is timm's EdgeNeXt-base in bf16 where timm is installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset[Any]):
    def __init__(self, folder: Path, size: int) -> None:
        self.files = sorted(folder.glob("*.jpg"))
        self.size = size

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[index % len(self.files)]) as image:
            pixels = numpy.asarray(image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR))
        if index % 2:
            pixels = pixels[:, ::-1].copy()
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255, index % 10


def network(device: str) -> nn.Module:
    if device == "cuda":
        try:
            import timm

            return timm.create_model("edgenext_base", num_classes=10)
        except ImportError:
            import torchvision

            return torchvision.models.resnet50(num_classes=10)
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, default=384)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(Pictures(arguments.folder, arguments.size), batch_size=arguments.batch_size, shuffle=True)
    model = network(device).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
    for batch in loader:
        images, labels = (part.to(device, non_blocking=True) for part in batch)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
