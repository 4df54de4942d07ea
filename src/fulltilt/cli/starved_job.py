"""The training script of `fulltilt demo`. It knows nothing of Fulltilt.

Reading an image takes 2 ms, as from a slow disk. The loader has no workers, so training waits for each of them.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PICTURES = 3200
BATCH = 16
READ_S = 0.002


class PicturesOnASlowDisk(Dataset[tuple[torch.Tensor, int]]):
    """A disc or a square in noise; an index always gives the same image."""

    def __len__(self) -> int:
        return PICTURES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(READ_S)
        generator = torch.Generator().manual_seed(index)
        label = index % 2
        radius, column, row = (torch.rand(3, generator=generator) * 10 + torch.tensor([4, 11, 11])).tolist()
        across = (torch.arange(32) - column).abs()
        down = (torch.arange(32) - row).abs().unsqueeze(1)
        inside = torch.maximum(across, down) < radius if label else across**2 + down**2 < radius**2
        return inside[None].float() + 0.3 * torch.randn(1, 32, 32, generator=generator), label


def main() -> None:
    """Train; each epoch prints a hash of its weights."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--epochs", type=int, default=3)
    epochs = arguments.parse_args().epochs
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the same weights, bit for bit, whatever else the machine does
    loader = DataLoader(PicturesOnASlowDisk(), batch_size=BATCH, shuffle=True, num_workers=0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    began_s = time.perf_counter()
    for epoch in range(1, epochs + 1):
        right = 0
        for pictures, labels in loader:
            scores = model(pictures)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((scores.argmax(1) == labels).sum())
        weights = hashlib.sha256(repr([weight.tolist() for weight in model.parameters()]).encode())
        print(f"epoch {epoch}: {100 * right / PICTURES:.0f} % right, weights {weights.hexdigest()[:12]}", flush=True)
    print(f"{time.perf_counter() - began_s:.1f} s of training", flush=True)


if __name__ == "__main__":
    main()
