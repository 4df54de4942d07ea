"""Opening images and masks, and converting them to 8 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from fulltilt.errors import DataError
from fulltilt.store import open_plain

# What Pillow reads and people train on.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """An open image. Raises DataError that names the file, also for errors while decoding."""
    try:
        with open_plain(path, follow=True) as file, Image.open(file) as picture:
            yield picture
    except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:
        what = f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, FileNotFoundError):
            what = f"{path} is not there"
        elif isinstance(error, UnidentifiedImageError):
            what = f"cannot read {path}: it is not an image that Pillow can read"
        raise DataError(what, "Repair the picture or take it out of the data.") from error


def sizes(paths: Iterable[Path]) -> list[tuple[int, int]]:
    """Width and height of each image. Raises DataError naming the first that cannot be read."""

    def size(path: Path) -> tuple[int, int]:
        with opened(path) as picture:
            return picture.width, picture.height

    with ThreadPoolExecutor(16) as readers:  # only headers are read, and a network disk answers many at once
        found = [readers.submit(size, path) for path in paths]
    bad = [error for each in found if isinstance(error := each.exception(), DataError)]
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise DataError(f"{bad[0].what}{more}", bad[0].remedy)
    return [each.result() for each in found]


def as_rgb(image: Any) -> Image.Image:
    """An image in RGB. Raises ValueError for pixels of 16 bits or floats, which Pillow would clip at 255."""
    if image.mode.startswith(("I", "F")):
        raise ValueError("its pixels have more than 8 bits a channel; convert it to 8")
    picture: Image.Image = image.convert("RGB")
    return picture


def as_mask(image: Any) -> Image.Image:
    """A mask of 0 to 255. In a mask in colours, or of small values (class indices), everything but black is inside.

    Not so in a JPEG, where black is never exactly 0.
    """
    mask: Image.Image = image.convert("L")
    if image.format == "JPEG":
        return mask
    if image.mode not in ("1", "L", "LA") and not image.mode.startswith("I"):
        colours = np.asarray(image.convert("RGB"))
        if (colours != colours[..., :1]).any():
            return Image.fromarray(colours.any(axis=2).astype(np.uint8) * np.uint8(255))
    if mask.getextrema()[1] < 128:
        mask = mask.point(lambda value: 255 * (value > 0))
    return mask
