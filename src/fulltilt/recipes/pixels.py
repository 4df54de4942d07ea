"""Pictures and masks of any kind of pixel, as eight bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image


def as_rgb(opened: Any) -> Image.Image:
    """A picture in RGB. Pillow would cut 16-bit values off at 255, and the picture would come out white."""
    if opened.mode.startswith("I"):
        values = np.asarray(opened)
        opened = Image.fromarray((values // (257 if values.max(initial=0) > 255 else 1)).astype(np.uint8))
    picture: Image.Image = opened.convert("RGB")
    return picture


def as_mask(opened: Any) -> Image.Image:
    """A mask of 0 to 255. One without a bright pixel holds numbers of classes or objects: any but 0 is inside.

    Not so in a JPEG, whose black is never quite black.
    """
    mask: Image.Image = opened.convert("L")
    if opened.format != "JPEG" and mask.getextrema()[1] < 128:
        mask = mask.point(lambda value: 255 * (value > 0))
    return mask
