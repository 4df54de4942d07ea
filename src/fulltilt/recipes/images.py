"""Which files of a data set are pictures, and pictures and masks of any kind of pixel as eight bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

# What Pillow reads and people train on.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")


def as_rgb(opened: Any) -> Image.Image:
    """A picture in RGB. Pillow would cut deeper values off at 255, which is white, and fractions of one at 0."""
    if opened.mode.startswith(("I", "F")):
        values = np.nan_to_num(np.asarray(opened, np.float64))
        highest = values.max(initial=0)
        if opened.mode == "F" and highest <= 1:
            values *= 255
        elif highest > 255:
            values /= max(257, highest / 255)
        opened = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    picture: Image.Image = opened.convert("RGB")
    return picture


def as_mask(opened: Any) -> Image.Image:
    """A mask of 0 to 255. One in colours, or without a bright pixel, tells classes or objects: any but black is inside.

    Not so in a JPEG, whose black is never quite black. Of one colour throughout, it is told by what is transparent.
    """
    mask: Image.Image = opened.convert("L")
    if opened.format == "JPEG":
        return mask
    if opened.has_transparency_data and _of_one_value(opened.convert("RGB")):
        alpha: Image.Image = opened.convert("RGBA").getchannel("A")
        if not _of_one_value(alpha):
            return alpha
    if opened.mode not in ("1", "L", "LA") and not opened.mode.startswith("I"):
        colours = np.asarray(opened.convert("RGB"))
        if (colours != colours[..., :1]).any():
            return Image.fromarray(colours.any(axis=2).astype(np.uint8) * np.uint8(255))
    if mask.getextrema()[1] < 128:
        mask = mask.point(lambda value: 255 * (value > 0))
    return mask


def _of_one_value(image: Image.Image) -> bool:
    return all(low == high for low, high in (band.getextrema() for band in image.split()))
