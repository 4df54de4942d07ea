"""Photometric transforms of float images in [0, 1], and SpecAugment; each sample has random numbers of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from fulltilt.errors import UsageError
from fulltilt.feed.augment.geometry import IMAGES, Bounds, CheckedParameters, Shape


class Photometric(Protocol):
    """A photometric transform. It uses ``draws`` random numbers per sample."""

    draws: int

    def apply(self, image: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """The new image; ``image`` is float [batch, channels, height, width], ``u`` [batch, draws] in [0, 1)."""


@dataclass(frozen=True)
class ColourJitter(CheckedParameters):
    """Brightness, contrast, saturation (factors 1 ± value) and hue (± value of a turn), in this order.

    As in torchvision, except that the order is fixed, so that a batch is one computation.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    bounds: ClassVar[Bounds] = dict.fromkeys(("brightness", "contrast", "saturation"), (0.0, 100.0)) | {
        "hue": (0.0, 1.0)
    }
    draws = 4
    takes = IMAGES

    def apply(self, image: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """The new image."""
        u = u[:, :, None, None, None]
        if self.brightness:
            image = (image * _factor(u[:, 0], self.brightness)).clamp(0, 1)
        if self.contrast:
            mean = _grey(image).mean(dim=(-3, -2, -1), keepdim=True)
            image = torch.lerp(mean.expand_as(image), image, _factor(u[:, 1], self.contrast)).clamp(0, 1)
        if self.saturation and image.shape[1] == 3:
            grey = _grey(image).expand_as(image)
            image = torch.lerp(grey, image, _factor(u[:, 2], self.saturation)).clamp(0, 1)
        if self.hue and image.shape[1] == 3:
            image = _turn_hue(image, (u[:, 3, 0] * 2 - 1) * self.hue)
        return image


@dataclass(frozen=True)
class Normalise:
    """Subtract ``mean`` and divide by ``std``, per channel."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    _on: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, compare=False, repr=False)
    draws = 0

    def __post_init__(self) -> None:
        for name, given in (("mean", self.mean), ("std", self.std)):
            try:
                numbers = [float(number) for number in given]
            except (TypeError, ValueError):
                numbers = []
            if not numbers or not all(map(math.isfinite, numbers)) or (name == "std" and 0 in numbers):
                raise UsageError(f"Normalise: {name} is {given!r}; it should be a tuple of numbers, one a channel")
        if len({len(self.mean), len(self.std)} - {1}) > 1:
            raise UsageError(f"Normalise has {len(self.mean)} means and {len(self.std)} deviations for the channels")

    @property
    def takes(self) -> Shape:
        """As many channels as constants; any number for one constant."""
        constants = max(len(self.mean), len(self.std))
        return ("batch", "channels" if constants == 1 else constants, "height", "width")

    def prepare(self, device: torch.device) -> None:
        """Copy the constants to the device once: a copy in each step would wait for the GPU."""
        if str(device) not in self._on:
            mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (self.mean, self.std))
            self._on[str(device)] = mean, std

    def apply(self, image: torch.Tensor, u: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The new image."""
        self.prepare(image.device)
        mean, std = self._on[str(image.device)]
        return (image - mean) / std


@dataclass(frozen=True)
class SpecAugment(CheckedParameters):
    """Mask ``time_masks`` bands of up to ``time_width`` steps, ``feature_masks`` of up to ``feature_width`` features.

    Park et al. 2019; for windows [batch, time, features]. ``fill`` None: the mean of the window.
    """

    time_masks: int = 2
    time_width: int = 10
    feature_masks: int = 2
    feature_width: int = 4
    fill: float | None = 0.0
    bounds: ClassVar[Bounds] = {
        "time_masks": (0, 1000),
        "time_width": (0, 2**31),
        "feature_masks": (0, 1000),
        "feature_width": (0, 2**31),
    }
    takes = ("batch", "time", "features")

    @property
    def draws(self) -> int:
        """Two numbers per band: its width and its start."""
        return 2 * (self.time_masks + self.feature_masks)

    def apply(self, windows: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """The new windows."""
        steps, features = windows.shape[-2:]
        time_draws, feature_draws = torch.split(u, [2 * self.time_masks, 2 * self.feature_masks], dim=1)
        time = _bands(time_draws, steps, self.time_width)[:, :, None]
        feature = _bands(feature_draws, features, self.feature_width)[:, None, :]
        blank = time | feature
        if self.fill is not None:
            return windows.masked_fill(blank, self.fill)
        return torch.where(blank, windows.mean(dim=(-2, -1), keepdim=True), windows)


def _factor(u: torch.Tensor, spread: float) -> torch.Tensor:
    low = max(0.0, 1.0 - spread)
    return low + u * (1.0 + spread - low)


def _grey(image: torch.Tensor) -> torch.Tensor:
    if image.shape[1] != 3:
        return image.mean(dim=1, keepdim=True)
    red, green, blue = image.unbind(dim=1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue)[:, None]


def _turn_hue(image: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotate the hue by ``turn`` ([batch, 1, 1], in turns) through HSV."""
    red, green, blue = image.unbind(dim=1)
    value, low = image.amax(dim=1), image.amin(dim=1)
    spread = value - low
    grey = spread == 0
    divisor = torch.where(grey, torch.ones_like(spread), spread)
    to_red, to_green, to_blue = (value - red) / divisor, (value - green) / divisor, (value - blue) / divisor
    is_red, is_green = value == red, (value == green) & (value != red)
    sector = torch.where(is_red, to_blue - to_green, torch.where(is_green, 2 + to_red - to_blue, 4 + to_green - to_red))
    hue = torch.where(grey, torch.zeros_like(sector), torch.remainder(sector / 6 + turn.to(image.dtype), 1.0)) * 6
    # Each channel is a trapezoid of the hue, the channels a third of a turn apart.
    channels = [value - spread * _ramp(torch.remainder(hue + shift, 6.0)) for shift in (5, 3, 1)]
    return torch.stack(channels, dim=1)


def _ramp(place: torch.Tensor) -> torch.Tensor:
    return torch.minimum(place, 4 - place).clamp(0, 1)


def _bands(u: torch.Tensor, length: int, widest: int) -> torch.Tensor:
    """[batch, length]: whether a position is in a band. Widths are uniform on 0..widest, starts on what fits."""
    pairs = u.view(len(u), -1, 2)
    width = torch.floor(pairs[..., 0] * (min(widest, length) + 1))
    start = torch.floor(pairs[..., 1] * (length - width + 1))
    place = torch.arange(length, device=u.device)[None, None, :]
    return ((place >= start[..., None]) & (place < (start + width)[..., None])).any(dim=1)
