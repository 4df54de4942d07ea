"""The two jobs that are tuned, COD and CLIP, as scripts that people start: JPEG files, a DataLoader without workers.

    python bench/tune_job.py cod FOLDER [--small]

``--small`` is for trial runs on a CPU: tiny networks, and a wait instead of decoding.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from feedbench.images import MEAN, STD, Images, Segmenter, clip_loss, clip_model, make_images
from feedbench.measuring import Step, trainer
from torch import nn
from torch.utils.data import DataLoader

# With --small each sample waits this long, so that workers pay on any machine.
SMALL_WAIT_S = 0.004


class Endless(Images):
    """Files over and over in one pass; each is flipped or not by its number, so that no random number is drawn."""

    wait_s = 0.0

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        from torchvision.transforms.v2.functional import normalize

        number = index % len(self.files)
        time.sleep(self.wait_s)
        pixels, other = super().__getitem__(number)
        pixels = pixels.flip(-1) if number % 2 else pixels
        return normalize(pixels.float() / 255, list(MEAN), list(STD)), other


class Job(NamedTuple):
    """One job, ready to train."""

    name: str
    data: Endless
    batch_size: int
    step: Step


def pictures(name: str, folder: Path, small: bool) -> list[tuple[str, str | None]]:
    """The job's files, made where they are not there yet."""
    masks = name == "cod"
    count, width, height = (24, 96, 64) if small else (512, 800, 600) if masks else (1024, 400, 300)
    made = sorted(str(path) for path in folder.glob("*.jpg"))
    if not made:
        return make_images(folder, count, width, height, masks=masks)
    return [(path, path[:-3] + "png" if masks else None) for path in made] * 2


def network(name: str, small: bool) -> nn.Module:
    if name == "cod":
        return nn.Conv2d(3, 1, 3, padding=1) if small else Segmenter("edgenext_base")
    return clip_model(small)


def cod_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch[0]).float(), (batch[1] > 127).float())


def make(name: str, folder: Path, device: torch.device, small: bool) -> Job:
    size, batch_size = {"cod": (384, 64), "clip": (224, 256)}[name] if not small else (64 if name == "cod" else 32, 4)
    data = Endless(pictures(name, folder, small), size)
    data.wait_s = SMALL_WAIT_S if small else 0.0
    model = network(name, small).to(device)
    return Job(name, data, batch_size, trainer(model, cod_loss if name == "cod" else clip_loss))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=("cod", "clip"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cpu" if arguments.small or not torch.cuda.is_available() else "cuda")
    job = make(arguments.job, arguments.folder, device, arguments.small)
    for batch in DataLoader(job.data, batch_size=job.batch_size, shuffle=False):
        job.step([part.to(device, non_blocking=True) for part in batch])


if __name__ == "__main__":
    main()
