"""COD10K-v3 folders: images and their masks, checked before training, as tensors of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from fulltilt.errors import DataError
from fulltilt.recipes.cod import CodOptions
from fulltilt.recipes.images import SUFFIXES, as_mask, as_rgb, opened, sizes
from fulltilt.recipes.recipe import Request

PARTS = ("Train", "Test")


@dataclass(frozen=True, slots=True)
class Pair:
    """An image and its mask."""

    picture: Path
    mask: Path


def pairs(root: Path, part: str, *, noncam: bool = False) -> list[Pair]:
    """The images of ``Train`` or ``Test``, in the order of their names. Raises DataError for a missing folder.

    Images named ``…-NonCAM-…`` show nothing hidden and are left out unless ``noncam``.
    """
    images, masks = root / part / "Image", root / part / "GT_Object"
    for folder in (root, images, masks):
        if not folder.is_dir():
            raise DataError(
                f"{folder} is {'a file, not a folder' if folder.exists() else 'not there'}",
                "Give the folder of COD10K-v3, which holds Train/Image, Train/GT_Object, Test/…",
            )
    present = _pictures_in(images)
    if not present:
        raise DataError(f"{images} holds no image", f"Their names end in {', '.join(SUFFIXES)}.")
    shown = [path for path in present if noncam or "-NonCAM-" not in path.name]
    if not shown:
        raise DataError(f"{images} holds no camouflaged image", "Use --include-noncam, or another folder.")
    named = {path.stem: path for path in _pictures_in(masks)}
    return [Pair(path, named.get(path.stem, masks / f"{path.stem}.png")) for path in shown]


def _pictures_in(folder: Path) -> list[Path]:
    """The images of a folder by name, a PNG after others of its name; without hidden files."""
    found = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != "."]
    return sorted(found, key=lambda path: (path.stem, path.suffix.lower() == ".png", path.name))


class Pictures(torch.utils.data.Dataset[Any]):
    """Pairs as uint8 tensors: the image [3, size, size], its mask [1, size, size] of 0 and 1."""

    deterministic = True  # the feed may keep what it returns

    def __init__(self, listed: list[Pair], size: int) -> None:
        self.pairs, self.size = listed, size

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        pair = self.pairs[index]
        place = (self.size, self.size)
        with opened(pair.mask) as drawn:
            mask = as_mask(drawn).resize(place, Image.Resampling.BILINEAR)
        with opened(pair.picture) as taken:
            taken.draft("RGB", place)  # decodes a large JPEG at a fraction of its size
            picture = as_rgb(taken).resize(place, Image.Resampling.BILINEAR)
        image = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(self.size, self.size, 3)
        hidden = torch.frombuffer(bytearray(mask.tobytes()), dtype=torch.uint8).view(1, self.size, self.size)
        return image.permute(2, 0, 1).contiguous(), (hidden > 127).to(torch.uint8)


def check(request: Request) -> None:
    """Check every pair. Raises DataError."""
    options: CodOptions = request.options
    for part in PARTS:
        check_pairs(pairs(request.data, part, noncam=options.include_noncam))


def check_pairs(listed: Sequence[Pair]) -> None:
    """Raise DataError when an image has no mask, cannot be opened, or has a mask of another size."""
    missing = [pair for pair in listed if not pair.mask.is_file()]
    if missing:
        mask = missing[0].mask
        what = f"no mask for {missing[0].picture}{_alike(missing, listed)}"
        raise DataError(what, f"Put it into {mask.parent} as {mask.name}.")
    both = zip(sizes(pair.picture for pair in listed), sizes(pair.mask for pair in listed), strict=True)
    differing = [
        (pair, f"{drawn[0]}×{drawn[1]}, its picture {size[0]}×{size[1]}")
        for pair, (size, drawn) in zip(listed, both, strict=True)
        if size != drawn
    ]
    if differing:
        pair, found = differing[0]
        what = f"{pair.mask} is {found}{_alike(differing, listed)}"
        raise DataError(what, "A mask has the size of its picture: export it again, or take both out.")


def _alike(bad: Sequence[Any], listed: Sequence[Pair]) -> str:
    return f" ({len(bad)} of {len(listed)} are like that)" if len(bad) > 1 else ""
