"""Camouflaged objects as COD10K-v3 stores them: shapes in the texture of their background, which only turns in them.

Object and background share palette and mean brightness. What tells them apart is the direction and the grain of the
texture, and a body's shading, lit from above; slow light over the whole picture keeps brightness alone from telling.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fulltilt.recipes.synthetic import in_processes

Array = np.ndarray[Any, Any]

# Every fifth picture is for testing; every tenth shows nothing hidden, as COD10K's NonCAM.
TEST_EVERY, EMPTY_EVERY = 5, 10
CREATURES = ("Aquatic-BatFish", "Terrestrial-Lizard", "Flying-Moth", "Amphibian-Toad", "Aquatic-Flounder")
WAVES = 24


def make(folder: Path, size: int, seed: int) -> Iterator[int]:
    """Write ``size`` pictures with their masks; yields once for each."""
    for part in ("Train", "Test"):
        for kind in ("Image", "GT_Object"):
            (folder / part / kind).mkdir(parents=True)
    yield from in_processes(functools.partial(_write, folder, seed), size)


def _write(folder: Path, seed: int, numbers: range) -> None:
    for number in numbers:
        picture, mask = draw(number, seed)
        part = "Test" if number % TEST_EVERY == TEST_EVERY - 1 else "Train"
        name = _name(number)
        Image.fromarray(picture).save(folder / part / "Image" / f"{name}.jpg", quality=92)
        Image.fromarray(mask).save(folder / part / "GT_Object" / f"{name}.png", compress_level=1)


def _name(number: int) -> str:
    if _is_empty(number):
        return f"COD10K-NonCAM-1-Background-1-Synthetic-{number + 1}"
    kind = number % len(CREATURES)
    family, creature = CREATURES[kind].split("-")
    return f"COD10K-CAM-1-{family}-{kind + 1}-{creature}-{number + 1}"


def _is_empty(number: int) -> bool:
    return number // TEST_EVERY % EMPTY_EVERY == EMPTY_EVERY - 1


def draw(number: int, seed: int) -> tuple[Array, Array]:
    """Picture number ``number`` (uint8 RGB) and its mask (0 or 255), the same for the same number and seed."""
    rng = np.random.default_rng((seed, number))
    height, width = (int(side) for side in rng.integers(176, 241, size=2))
    direction = rng.uniform(0, math.pi)
    grain = rng.uniform(0.16, 0.34)
    inside, shade = np.zeros((2, height, width), np.float32)
    if not _is_empty(number):
        for _ in range(1 + (rng.random() < 0.2)):
            body, height_on_body = _shape(rng, height, width)
            shade = np.where(body > inside, height_on_body, shade)
            inside = np.maximum(inside, body)
    turned = direction + rng.choice((-1, 1)) * rng.uniform(0.7, math.pi / 2)
    outer = _texture(rng, height, width, direction, grain)
    inner = _texture(rng, height, width, turned, grain * rng.uniform(0.7, 1.4))
    surface = outer + inside * (inner + rng.uniform(0.6, 1.1) * shade - outer)
    light = _texture(rng, height, width, rng.uniform(0, math.pi), 0.012)
    surface += 0.35 * light
    surface += 0.18 * rng.standard_normal((height, width), dtype=np.float32)
    return _coloured(rng, surface), np.where(inside > 0.5, np.uint8(255), np.uint8(0))


def _texture(rng: np.random.Generator, height: int, width: int, direction: float, grain: float) -> Array:
    """Waves about ``direction`` (radians) with about ``grain`` radians a pixel, added up; unit variance."""
    angle = direction + rng.normal(0, 0.22, WAVES)
    rate = grain * np.exp(rng.normal(0, 0.3, WAVES))
    phase = rng.uniform(0, 2 * math.pi, WAVES)
    across = np.outer(np.arange(width), rate * np.cos(angle)) + phase
    down = np.outer(np.arange(height), rate * np.sin(angle))
    # sin(a + b) by the addition theorem: one product of two small matrices instead of a sine for every wave and pixel.
    rows = np.concatenate((np.cos(down), np.sin(down)), axis=1).astype(np.float32)
    columns = np.concatenate((np.sin(across), np.cos(across)), axis=1).astype(np.float32)
    # Not ``@``: several processes that each start BLAS threads spend their time waiting for one another.
    field: Array = np.einsum("hk,kw->hw", rows, np.ascontiguousarray(columns.T))
    return field * np.float32(math.sqrt(2 / WAVES))


def _shape(rng: np.random.Generator, height: int, width: int) -> tuple[Array, Array]:
    """A lobed, stretched blob with a soft edge, 1 inside and 0 outside; and how high on it a pixel is, 1 to -1."""
    size = min(height, width) * rng.uniform(0.16, 0.34)
    centre_y, centre_x = (side * rng.uniform(0.25, 0.75) for side in (height, width))
    tilt, stretch = rng.uniform(0, math.pi), rng.uniform(1.0, 1.8)
    y, x = np.ogrid[:height, :width]
    x, y = (x - centre_x).astype(np.float32), (y - centre_y).astype(np.float32)
    along = (x * math.cos(tilt) + y * math.sin(tilt)) / stretch
    beside = (y * math.cos(tilt) - x * math.sin(tilt)) * math.sqrt(stretch)
    distance = np.sqrt(along * along + beside * beside) + np.float32(1e-3)
    turn = (along + 1j * beside) / distance  # a number on the unit circle; its powers go round once for each lobe
    radius = np.full_like(distance, size)
    for lobes, power in ((2, turn * turn), (3, turn * turn * turn)):
        reach = size * rng.uniform(0, 0.3) / math.sqrt(lobes)
        radius += (power * np.complex64(reach * np.exp(2j * math.pi * rng.random()))).real
    filled: Array = np.clip((radius - distance) / 2 + 0.5, 0, 1)
    return filled, np.clip(-y / size, -1, 1)


def _coloured(rng: np.random.Generator, surface: Array) -> Array:
    """The surface in the two colours of its palette."""
    dark = rng.uniform(20, 110, 3)
    bright = dark + rng.uniform(60, 140, 3)
    table = (dark + (bright - dark) * np.linspace(0, 1, 256)[:, None]).astype(np.uint8)
    picture: Array = table[(np.clip(surface * 0.22 + 0.5, 0, 1) * 255).astype(np.uint8)]
    return picture
