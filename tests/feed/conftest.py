"""Small data sets with every place where randomness can hide."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


class Pixels:
    """Deterministic images with a label, made from the index alone."""

    def __init__(self, samples: int = 23, size: int = 12) -> None:
        self.samples = samples
        self.size = size

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randint(0, 256, (3, self.size, self.size), generator=generator, dtype=torch.uint8)
        return pixels, index


class Transformed:
    """PIL images behind a transform, as torchvision's data sets have it."""

    def __init__(self, transform: Callable[..., Any] | None, samples: int = 20) -> None:
        self.transform = transform
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        generator = torch.Generator().manual_seed(index)
        pixels = torch.randint(0, 256, (24, 20, 3), generator=generator, dtype=torch.uint8)
        image = Image.fromarray(pixels.numpy())
        return (self.transform(image) if self.transform is not None else image), index


class Drawn:
    """A sample made by a function of the index."""

    def __init__(self, draw: Callable[[int], Any], samples: int = 20) -> None:
        self.draw = draw
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.draw(index)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _no_worker_is_left_behind() -> Iterator[None]:
    yield
    import multiprocessing

    left = [child for child in multiprocessing.active_children() if child.name.startswith("fulltilt-feed")]
    for child in left:
        child.join(3)
    assert not [child for child in left if child.is_alive()], f"workers of pid {os.getpid()} were not ended"
