"""Images of cars and their captions, from folders ``make/model/year`` or a CSV, as tensors that the feed can keep."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from fulltilt.errors import DataError, UsageError
from fulltilt.feed.augment import ColourJitter, HorizontalFlip, Pipeline, RandomResizedCrop
from fulltilt.figures import count
from fulltilt.recipes import tables
from fulltilt.recipes.carclip import TEMPLATES
from fulltilt.recipes.images import SUFFIXES, as_rgb, opened

# This table in a data folder is read instead of the names of the folders.
CAPTIONS = "captions.csv"
# Images that agree in all of these show the same car.
CAR_COLUMNS = ("make", "model", "year", "colour", "color", "body")
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "val"}


@dataclass(frozen=True, slots=True)
class Picture:
    """One image. ``car`` identifies the car; without a caption it is make, model and year."""

    path: Path
    caption: str | None
    car: tuple[str, ...]
    split: str


def read(data: Path, val_share: float) -> list[Picture]:
    """The images of a folder or CSV, each in ``train`` or ``val``. Raises DataError, UsageError."""
    if data.is_file():
        pictures = _from_csv(data)
    elif (data / CAPTIONS).is_file():
        pictures = _from_csv(data / CAPTIONS)
    elif data.is_dir():
        pictures = _from_folders(data)
    else:
        raise DataError(f"there is no folder or CSV {data}", "Give --data DIR (make/model/year/*.jpg) or FILE.csv.")
    if any(picture.split == "val" for picture in pictures):  # the data states its split
        pictures = [replace(picture, split=picture.split or "train") for picture in pictures]
    else:
        root = data if data.is_dir() else data.parent
        held = [_share_of(picture.path, root) < val_share for picture in pictures]
        pictures = [replace(one, split="val" if val else "train") for one, val in zip(pictures, held, strict=True)]
    for split in ("train", "val"):
        if sum(picture.split == split for picture in pictures) < 2:
            raise DataError(
                f"{data} has {count('picture', len(pictures))}, fewer than 2 of them for {split}",
                "Add pictures, or change --val-share.",
            )
    return pictures


def _from_folders(root: Path) -> list[Picture]:
    found = []
    for path in sorted(root.rglob("*")):
        if path.suffix.lower() not in SUFFIXES or path.name.startswith("."):
            continue  # files of the system begin with a dot
        names = path.relative_to(root).parts[:-1]
        split = SPLITS.get(names[0].lower(), "") if len(names) == 4 else ""
        if len(names) != (4 if split else 3):
            raise DataError(
                f"{path} does not lie in a folder make/model/year of {root}",
                "Sort the pictures as make/model/year/picture.jpg, with train/ and val/ above or not, or use a CSV.",
            )
        found.append(Picture(path, None, tuple(name.replace("_", " ") for name in names[-3:]), split))
    if not found:
        raise DataError(
            f"{root} holds no images ({', '.join(SUFFIXES)})",
            f"Sort them as make/model/year/picture.jpg, or put a {CAPTIONS} of image and caption there.",
        )
    return found


def _from_csv(table: Path) -> list[Picture]:
    try:
        columns, rows = tables.read(table, ("image", "caption"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {table}: {error}", "It should be a CSV in UTF-8 with a header line.") from error
    if missing := {"image", "caption"} - {*columns}:
        has = f"its columns are: {', '.join(columns) or 'none'}"
        raise DataError(f"{table} has no column {' and '.join(sorted(missing))}; {has}", "Rename one of them.")
    return [_from_row(row, table, line) for line, row in rows]


def _from_row(row: dict[str, str], table: Path, number: int) -> Picture:
    caption = (row["caption"] or "").strip()
    if not row["image"] or not caption:
        missing = "caption" if row["image"] else "image"
        raise DataError(f"line {number} of {table} has no {missing}", "Fill it in, or take the line out.")
    told = (row.get("split") or "").strip().lower()
    if told and told not in SPLITS:
        raise DataError(f"line {number} of {table}: split is {told!r}", f"Use {', '.join(SPLITS)}.")
    # The columns identify the car, or else the caption.
    known = tuple((row.get(name) or "").strip() for name in CAR_COLUMNS)
    car = known if all(known[:3]) else (caption,)
    return Picture(table.parent / row["image"], caption, car, SPLITS.get(told, ""))


def _share_of(path: Path, root: Path) -> float:
    """A number in [0, 1) from the path below ``root``: adding images moves none to the other split."""
    try:
        name = path.relative_to(root).as_posix()
    except ValueError:  # a CSV may name pictures anywhere
        name = path.as_posix()
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).digest()) / 2**48


def refuse_one_car(pictures: Iterable[Picture]) -> None:
    """Raise DataError where all training images show the same car: every caption would fit each."""
    shown = {picture.car for picture in pictures if picture.split == "train"}
    if len(shown) == 1:
        raise DataError(
            f"every picture to train on is said to show the same car ({' '.join(shown.pop())[:60]})",
            "There is nothing to tell apart: give each car a folder or caption of its own.",
        )


def read_templates(file: str | None) -> tuple[str, ...]:
    """The caption templates of a file, one per line, or ours. Raises UsageError."""
    if file is None:
        return TEMPLATES
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the caption templates {file}: {error}") from error
    templates = tuple(line for line in lines if line and not line.startswith("#"))
    for template in templates:
        try:
            template.format(make="", model="", year="")
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(
                f"{file}: the template {template!r} cannot be filled in ({error})", "Use {make}, {model} and {year}."
            ) from error
    if not templates:
        raise UsageError(
            f"{file} holds no caption template", "Write one a line, such as: a photo of a {year} {make} {model}."
        )
    return templates


class CarPictures(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """``image`` uint8 [3, side, side], ``tokens`` [captions, length], ``car`` as a number."""

    deterministic = True  # the feed may keep what it returns

    def __init__(
        self,
        pictures: Sequence[Picture],
        side: int,
        templates: Sequence[str],
        tokenise: Callable[[list[str]], torch.Tensor],
    ) -> None:
        self.paths = [str(picture.path) for picture in pictures]
        self.side = side
        cars = {car: number for number, car in enumerate(dict.fromkeys(picture.car for picture in pictures))}
        self.cars = torch.tensor([cars[picture.car] for picture in pictures])
        # Thousands of images share a few captions: each is tokenised once.
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
        }


def captions_of(picture: Picture, templates: Sequence[str]) -> tuple[str, ...]:
    """The captions of an image: its own, or the templates filled in."""
    if picture.caption is not None:
        return (picture.caption,)
    make, model, year = picture.car
    return tuple(template.format(make=make, model=model, year=year) for template in templates)


def decoded(path: Path, side: int) -> torch.Tensor:
    """uint8 [3, side, side], as CLIP prepares images: resized by the shorter side and centre-cropped."""
    with opened(path) as taken:
        taken.draft("RGB", (2 * side, 2 * side))  # decodes a large JPEG at a fraction of its size
        picture = as_rgb(ImageOps.exif_transpose(taken))
    if picture.size != (side, side):
        picture = ImageOps.fit(picture, (side, side), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


class CarViews(Pipeline):
    """Augments the image and chooses its caption for the epoch. Hue is kept, as captions name colours."""

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
        """See Augmentation. Captions take turns over the epochs."""
        seen: dict[str, torch.Tensor] = (
            super().__call__(batch, seed, epoch, indices) if self.transforms else dict(batch)
        )
        tokens = batch["tokens"]
        turn = (indices.to(tokens.device) + epoch) % tokens.shape[1]
        return {**seen, "tokens": tokens[torch.arange(len(tokens), device=tokens.device), turn]}
