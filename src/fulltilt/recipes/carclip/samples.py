"""Pictures and captions as fixed-shape tensors: the same every time, so that the feed can keep them decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulltilt.errors import DataError
from fulltilt.feed.augment import ColourJitter, HorizontalFlip, Pipeline, RandomResizedCrop
from fulltilt.recipes.carclip.table import Label, Picture
from fulltilt.recipes.pixels import as_rgb


class CarPictures(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """``image`` uint8 [3, side, side], ``tokens`` [captions, length], ``car`` and ``label`` as numbers.

    ``label`` is the place in ``labels``, or -1. Every picture has as many captions as any other.
    """

    deterministic = True  # the feed may keep what it returns

    def __init__(
        self,
        pictures: Sequence[Picture],
        side: int,
        labels: Sequence[Label],
        templates: Sequence[str],
        tokenise: Callable[[list[str]], torch.Tensor],
    ) -> None:
        self.paths = [str(picture.path) for picture in pictures]
        self.side = side
        cars = {car: number for number, car in enumerate(dict.fromkeys(picture.car for picture in pictures))}
        places = {label: place for place, label in enumerate(labels)}
        self.cars = torch.tensor([cars[picture.car] for picture in pictures])
        self.labels = torch.tensor([places.get(picture.label, -1) if picture.label else -1 for picture in pictures])
        # Thousands of pictures share a few captions; each is kept once.
        texts = [captions_of(picture, templates) for picture in pictures]
        rows = {captions: row for row, captions in enumerate(dict.fromkeys(texts))}
        self.rows = torch.tensor([rows[captions] for captions in texts])
        flat = tokenise([caption for captions in rows for caption in captions])
        self.tokens = flat.view(len(rows), len(texts[0]), -1)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "image": decoded(Path(self.paths[index]), self.side),
            "tokens": self.tokens[self.rows[index]],
            "car": self.cars[index],
            "label": self.labels[index],
        }


def captions_of(picture: Picture, templates: Sequence[str]) -> tuple[str, ...]:
    """What may be said of a picture: its own caption, or the templates filled in."""
    if picture.caption is not None:
        return (picture.caption,)
    assert picture.label is not None
    return prompts(picture.label, templates)


def prompts(label: Label, templates: Sequence[str]) -> tuple[str, ...]:
    """The templates filled in with make, model and year."""
    make, model, year = label
    return tuple(template.format(make=make, model=model, year=year) for template in templates)


def decoded(path: Path, side: int) -> torch.Tensor:
    """uint8 [3, side, side]: CLIP's own preparation, the shorter side scaled and the middle cut out."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            opened.draft("RGB", (2 * side, 2 * side))  # a large JPEG is decoded at a fraction of its size
            picture = as_rgb(ImageOps.exif_transpose(opened))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read {path}: {error}", "Repair the picture or take it out of the data.") from error
    if picture.size != (side, side):
        picture = ImageOps.fit(picture, (side, side), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


class CarViews(Pipeline):
    """What a picture looks like in an epoch, and which of its captions goes with it. Paint keeps its colour."""

    def __init__(self, side: int, *, augment: bool) -> None:
        views: list[Any] = [
            RandomResizedCrop(side, side, scale=(0.8, 1.0), ratio=(0.9, 1.1)),
            HorizontalFlip(),
            ColourJitter(brightness=0.2, contrast=0.2),
        ]
        super().__init__(views if augment else [], image="image")

    def __call__(
        self, batch: dict[str, torch.Tensor], seed: int, epoch: int, indices: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """See Augmentation. Captions take turns, so that each is seen as often as any other."""
        seen: dict[str, torch.Tensor] = (
            super().__call__(batch, seed, epoch, indices) if self.transforms else dict(batch)
        )
        tokens = batch["tokens"]
        turn = (indices.to(tokens.device) + epoch) % tokens.shape[1]
        return {**seen, "tokens": tokens[torch.arange(len(tokens), device=tokens.device), turn]}
