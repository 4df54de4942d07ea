"""Geometric transforms: each is a matrix per sample, and a chain of them is one resampling.

A matrix maps pixel coordinates of the output to those of the input (the centre of the first pixel is 0.5, 0.5).
A chain of flips and crops alone is an exact gather that keeps uint8. Otherwise images are sampled bilinearly;
masks always take the nearest pixel.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import ClassVar

import torch

from fulltilt.errors import UsageError

Size = tuple[int, int]  # height, width
# The axes of a batch; a number is a required length.
Shape = tuple[str | int, ...]
IMAGES: Shape = ("batch", "channels", "height", "width")
# Minimum and maximum of each parameter; ints for whole numbers.
Bounds = dict[str, tuple[float, float]]


class CheckedParameters:
    """A transform whose parameters must be numbers within its ``bounds``. Raises UsageError."""

    bounds: ClassVar[Bounds] = {}
    pairs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, (least, most) in self.bounds.items():
            given, pair, whole = getattr(self, name), name in self.pairs, isinstance(least, int)
            numbers = given if pair and isinstance(given, tuple | list) and len(given) == 2 else (given,)
            kind = Integral if whole else Real
            if len(numbers) <= pair or not all(
                isinstance(one, kind) and least <= float(one) <= most for one in numbers
            ):
                wanted = "two numbers" if pair else "a whole number" if whole else "a number"
                told = f"{type(self).__name__}: {name} is {given!r}"
                raise UsageError(f"{told}; it should be {wanted} from {least:g} to {most:g}")


class Geometric(CheckedParameters):
    """A geometric transform. It uses ``draws`` random numbers per sample; ``exact``: it moves whole pixels."""

    draws = 0
    exact = False
    takes: Shape = IMAGES

    def size(self, size: Size) -> Size:
        """The output size for an input size."""
        return size

    def matrix(self, u: torch.Tensor, size: Size) -> torch.Tensor:
        """[batch, 3, 3] from output to input coordinates; ``u`` is [batch, draws] in [0, 1)."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Flip(Geometric):
    p: float = 0.5
    bounds: ClassVar[Bounds] = {"p": (0.0, 1.0)}
    draws = 1
    exact = True
    axis = 0  # of the size

    def matrix(self, u: torch.Tensor, size: Size) -> torch.Tensor:
        flip = u[:, 0] < self.p
        sign, shift = torch.where(flip, -1.0, 1.0), torch.where(flip, float(size[self.axis]), 0.0)
        one, zero = torch.ones_like(sign), torch.zeros_like(sign)
        return _diagonal(one, sign, zero, shift) if self.axis == 0 else _diagonal(sign, one, shift, zero)


class HorizontalFlip(_Flip):
    """Mirror left and right with probability ``p``."""

    axis = 1


class VerticalFlip(_Flip):
    """Mirror top and bottom with probability ``p``."""


@dataclass(frozen=True)
class _Window(Geometric):
    height: int
    width: int
    bounds: ClassVar[Bounds] = {"height": (1, 2**16), "width": (1, 2**16)}

    def size(self, size: Size) -> Size:  # noqa: ARG002
        return self.height, self.width


@dataclass(frozen=True)
class RandomCrop(_Window):
    """A random crop of ``height`` × ``width``, after ``padding`` zeros on each side."""

    padding: int = 0
    bounds: ClassVar[Bounds] = _Window.bounds | {"padding": (0, 2**16)}
    draws = 2
    exact = True

    def size(self, size: Size) -> Size:
        """The window."""
        if self.height > size[0] + 2 * self.padding or self.width > size[1] + 2 * self.padding:
            raise UsageError(f"a crop of {self.height}×{self.width} does not fit an image of {size[0]}×{size[1]}")
        return super().size(size)

    def matrix(self, u: torch.Tensor, size: Size) -> torch.Tensor:
        """Output to input coordinates."""
        top = torch.floor(u[:, 0] * (size[0] + 2 * self.padding - self.height + 1)) - self.padding
        left = torch.floor(u[:, 1] * (size[1] + 2 * self.padding - self.width + 1)) - self.padding
        one = torch.ones_like(top)
        return _diagonal(one, one, left, top)


_TRIES = 10


@dataclass(frozen=True)
class RandomResizedCrop(_Window):
    """A crop of random area and aspect ratio, resized to ``height`` × ``width``, as in torchvision.

    Sampling is bilinear without antialiasing: keep images at no more than about twice the output size.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    bounds: ClassVar[Bounds] = _Window.bounds | {"scale": (0.0, 100.0), "ratio": (0.001, 1000.0)}
    pairs = ("scale", "ratio")
    draws = 2 * _TRIES + 2

    def matrix(self, u: torch.Tensor, size: Size) -> torch.Tensor:
        """Output to input coordinates."""
        height, width = size
        area = height * width * _between(u[:, :_TRIES], *self.scale)
        ratio = torch.exp(_between(u[:, _TRIES : 2 * _TRIES], math.log(self.ratio[0]), math.log(self.ratio[1])))
        w, h = torch.round(torch.sqrt(area * ratio)), torch.round(torch.sqrt(area / ratio))
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first = fits.to(torch.int8).argmax(dim=1, keepdim=True)
        found = fits.any(dim=1)
        w, h = w.gather(1, first)[:, 0], h.gather(1, first)[:, 0]
        # No try fits: the largest centred crop within the ratios.
        whole = width / height
        fallback_w = float(round(height * self.ratio[1])) if whole > self.ratio[1] else float(width)
        fallback_h = float(round(width / self.ratio[0])) if whole < self.ratio[0] else float(height)
        w, h = torch.where(found, w, fallback_w), torch.where(found, h, fallback_h)
        left = torch.where(found, torch.floor(u[:, -2] * (width - w + 1)), torch.floor((width - w) / 2))
        top = torch.where(found, torch.floor(u[:, -1] * (height - h + 1)), torch.floor((height - h) / 2))
        return _diagonal(w / self.width, h / self.height, left, top)


@dataclass(frozen=True)
class Affine(Geometric):
    """Rotation (degrees), translation (shares of the size) and scaling (factors) about the centre."""

    degrees: float = 0.0
    translate: tuple[float, float] = (0.0, 0.0)
    scale: tuple[float, float] = (1.0, 1.0)
    bounds: ClassVar[Bounds] = {"degrees": (-360.0, 360.0), "translate": (-1.0, 1.0), "scale": (0.001, 1000.0)}
    pairs = ("translate", "scale")
    draws = 4

    def matrix(self, u: torch.Tensor, size: Size) -> torch.Tensor:
        """Output to input coordinates."""
        x, y = size[1] / 2, size[0] / 2
        angle = torch.deg2rad(_between(u[:, 0], -self.degrees, self.degrees))
        from_x = -x - _between(u[:, 1], -self.translate[0], self.translate[0]) * size[1]
        from_y = -y - _between(u[:, 2], -self.translate[1], self.translate[1]) * size[0]
        factor = _between(u[:, 3], *self.scale)
        cos, sin = torch.cos(angle) / factor, torch.sin(angle) / factor
        return _matrix(cos, sin, cos * from_x + sin * from_y + x, -sin, cos, cos * from_y - sin * from_x + y)


# --------------------------------------------------------------------------- applying


def chain(transforms: list[Geometric], draws: list[torch.Tensor], size: Size) -> tuple[torch.Tensor, Size]:
    """The matrix and the output size of transforms applied in order."""
    matrices = []
    for transform, u in zip(transforms, draws, strict=True):
        matrices.append(transform.matrix(u, size))
        size = transform.size(size)
    return functools.reduce(torch.matmul, matrices), size


def pick(image: torch.Tensor, matrix: torch.Tensor, size: Size) -> torch.Tensor:
    """The nearest pixels of ``image`` [batch, channels, height, width] in its own dtype; zero outside of it."""
    x, y = _places(matrix, size)
    column, row = torch.floor(x).long(), torch.floor(y).long()
    height, width = image.shape[-2:]
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    sample = torch.arange(len(image), device=image.device)[:, None, None]
    picked = image.permute(0, 2, 3, 1)[sample, row.clamp(0, height - 1), column.clamp(0, width - 1)]
    return torch.where(inside[:, None], picked.permute(0, 3, 1, 2), torch.zeros_like(picked[:1, :1, :1, :1]))


def interpolate(image: torch.Tensor, matrix: torch.Tensor, size: Size) -> torch.Tensor:
    """``image`` (float) sampled bilinearly; zero outside of it."""
    x, y = _places(matrix, size)
    height, width = image.shape[-2:]
    grid = torch.stack((2 * x / width - 1, 2 * y / height - 1), dim=-1)
    return torch.nn.functional.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _places(matrix: torch.Tensor, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Input coordinates of the centre of each output pixel, [batch, height, width] each."""
    x = torch.arange(size[1], device=matrix.device, dtype=torch.float32)[None, None, :] + 0.5
    y = torch.arange(size[0], device=matrix.device, dtype=torch.float32)[None, :, None] + 0.5
    m = matrix[:, :, :, None, None]
    return m[:, 0, 0] * x + m[:, 0, 1] * y + m[:, 0, 2], m[:, 1, 0] * x + m[:, 1, 1] * y + m[:, 1, 2]


def _matrix(
    a: torch.Tensor, b: torch.Tensor, tx: torch.Tensor, c: torch.Tensor, d: torch.Tensor, ty: torch.Tensor
) -> torch.Tensor:
    zero, one = torch.zeros_like(a), torch.ones_like(a)
    return torch.stack((a, b, tx, c, d, ty, zero, zero, one), dim=-1).view(-1, 3, 3)


def _diagonal(sx: torch.Tensor, sy: torch.Tensor, tx: torch.Tensor, ty: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros_like(sx)
    return _matrix(sx, zero, tx, zero, sy, ty)


def _between(u: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return low + u * (high - low)
