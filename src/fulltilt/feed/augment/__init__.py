"""Augmentation of whole batches on the device; random numbers depend on (seed, epoch, sample index) only.

Results do not depend on workers, ranks, batches or resumes. Image and mask of a sample get the same geometry.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from fulltilt.errors import UsageError
from fulltilt.feed.augment.geometry import (
    Affine,
    Geometric,
    HorizontalFlip,
    RandomCrop,
    RandomResizedCrop,
    VerticalFlip,
    chain,
    interpolate,
    pick,
)
from fulltilt.feed.augment.photometric import ColourJitter, Normalise, Photometric, SpecAugment
from fulltilt.feed.epoch_order import sample_of
from fulltilt.feed.random_numbers import as_int64, uniform
from fulltilt.feed.sample_layout import container_like

__all__ = [
    "Affine",
    "Augmentation",
    "ColourJitter",
    "HorizontalFlip",
    "Normalise",
    "Pipeline",
    "RandomCrop",
    "RandomResizedCrop",
    "SpecAugment",
    "VerticalFlip",
]

Key = int | str


@runtime_checkable
class Augmentation(Protocol):
    """Called by the loader with each batch."""

    def __call__(self, batch: Any, seed: int, epoch: int, indices: torch.Tensor) -> Any:
        """The augmented batch; ``indices`` are the numbers of its draws on the device."""


class Pipeline:
    """Applies transforms in order to the image of a batch, and the geometric ones to its mask too.

    ``image`` and ``mask`` are positions or keys in the batch; by default the image is the first tensor that may be one,
    the mask another one of the same height and width. uint8 becomes float in [0, 1] where a transform needs it.
    ``compile`` None: on a GPU with more than one transform.
    """

    def __init__(
        self,
        transforms: Iterable[Geometric | Photometric | SpecAugment],
        *,
        image: Key | None = None,
        mask: Key | None = None,
        compile: bool | None = None,
    ) -> None:
        self.transforms = list(transforms)
        self.image, self.mask, self.compile = image, mask, compile
        for transform in self.transforms:
            if not hasattr(transform, "matrix") and not hasattr(transform, "apply"):
                raise UsageError(
                    f"{type(transform).__name__} is not a transform of fulltilt.feed.augment",
                    "Give a function of the batch as augment=, or leave it in the data set.",
                )
        # Geometric transforms in a row are one resampling.
        by_kind = itertools.groupby(self.transforms, lambda transform: isinstance(transform, Geometric))
        self._groups: list[list[Any]] = [list(group) for _, group in by_kind]
        self._compiled: Callable[..., Any] | None = None
        self._rows, self._short = 0, False  # the batch size it is compiled for; whether the last batch was smaller
        self._steered_by: tuple[int, int, torch.device] | None = None
        self._steering: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, batch: Any, seed: int, epoch: int, indices: torch.Tensor) -> Any:
        """The augmented batch, in the structure of ``batch``."""
        image_key, mask_key = self._keys(batch)
        image = batch if image_key is None else batch[image_key]
        mask = batch[mask_key] if mask_key is not None else None
        self._check_shapes(image, mask)
        for transform in self.transforms:
            prepare = getattr(transform, "prepare", None)
            if prepare is not None:
                prepare(image.device)
        image, mask = self._run(image, mask, seed, epoch, indices)
        if image_key is None:
            return image
        changed = {image_key: image, mask_key: mask}
        keys = batch if isinstance(batch, Mapping) else range(len(batch))
        return container_like(batch, [changed.get(key, batch[key]) for key in keys])

    def _check_shapes(self, image: torch.Tensor, mask: torch.Tensor | None) -> None:
        for transform in self.transforms:
            takes = getattr(transform, "takes", None)
            if takes is None:
                break  # a user's transform may change the shape for the next
            shape = image.shape
            if len(takes) != len(shape) or any(a != b for a, b in zip(takes, shape, strict=True) if type(a) is int):
                raise UsageError(
                    f"{type(transform).__name__} takes a batch of [{', '.join(map(str, takes))}], not of {list(shape)}",
                    "Name the tensor with Pipeline(..., image=...), or give the data set's samples that shape.",
                )
        size = image.shape[-2:]
        if mask is not None and (mask.ndim not in (3, 4) or len(mask) != len(image) or mask.shape[-2:] != size):
            raise UsageError(
                f"the mask should be [{len(image)}, {size[0]}, {size[1]}] as the image is, "
                f"with or without channels, not {list(mask.shape)}",
                "Name it with Pipeline(..., mask=...), or give both the same size.",
            )

    def _run(
        self, image: torch.Tensor, mask: torch.Tensor | None, seed: int, epoch: int, indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        worth_it = len(self.transforms) > 1 and image.device.type == "cuda"  # compiling takes seconds
        if not (self.compile if self.compile is not None else worth_it):
            return self.apply(image, mask, seed, epoch, indices)
        if self._compiled is None:
            self._compiled = torch.compile(self.apply)
        steering = self._as_tensors(seed, epoch, image.device)
        samples = len(image)
        lacking = self._lacking(samples)
        padded = (_padded(image, lacking), None if mask is None else _padded(mask, lacking))
        try:
            image_done, mask_done = self._compiled(*padded, *steering, _padded(indices, lacking))
            return image_done[:samples], None if mask_done is None else mask_done[:samples]
        except Exception as error:
            if self.compile:
                raise
            # Compilation was not asked for: without a compiler on the machine it runs eagerly.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            # A compiler's own error is its last line.
            why = lines[0] if len(lines) == 1 else f"{lines[0][:200]} … {lines[-1][:300]}"
            warnings.warn(f"augmentation runs uncompiled: {why}", stacklevel=4)
            self.compile = False
            return self.apply(image, mask, seed, epoch, indices)

    def _lacking(self, samples: int) -> int:
        """The samples to pad with: compiling for the smaller last batch of an epoch would take many seconds."""
        was_short, self._short = self._short, samples < self._rows
        if samples > self._rows or (was_short and self._short):
            self._rows, self._short = samples, False
        return self._rows - samples

    def _as_tensors(self, seed: int, epoch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Seed and epoch as tensors for compiled code, made once per epoch to save launches.

        A Python number becomes a symbol with its second value, and torch 2.11 compiles bit operations on it to
        floating-point ones (triton: "invalid operands of type float32").
        """
        if self._steering is None or self._steered_by != (seed, epoch, device):
            seed_tensor, epoch_tensor = (
                torch.full((), as_int64(number), dtype=torch.int64, device=device) for number in (seed, epoch)
            )
            self._steered_by, self._steering = (seed, epoch, device), (seed_tensor, epoch_tensor)
        return self._steering

    def apply(
        self,
        image: torch.Tensor,
        mask: torch.Tensor | None,
        seed: torch.Tensor | int,
        epoch: torch.Tensor | int,
        indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Image and mask after all transforms: pure tensor operations, the same on every device."""
        counts = [transform.draws for transform in self.transforms]
        # One call for all transforms saves launches.
        numbers = iter(torch.split(uniform(seed, epoch, indices, sum(counts)), counts, dim=1))
        for group in self._groups:
            draws = [next(numbers) for _ in group]
            if isinstance(group[0], Geometric):
                image, mask = _move(image, mask, group, draws)
                continue
            for transform, u in zip(group, draws, strict=True):
                image = transform.apply(_as_float(image), u)
        return image, mask

    def _keys(self, batch: Any) -> tuple[Key | None, Key | None]:
        if isinstance(batch, torch.Tensor):
            return None, None
        keys: list[Key] = list(batch) if isinstance(batch, Mapping) else list(range(len(batch)))
        tensors = [key for key in keys if isinstance(batch[key], torch.Tensor)]
        moves = any(isinstance(transform, Geometric) for transform in self.transforms)
        images = [key for key in tensors if batch[key].ndim >= 3]  # labels may come first
        images = images if images or moves else tensors
        image = self.image if self.image is not None else next(iter(images), None)
        if image not in tensors or self.mask not in (None, *tensors):
            sought = "image" if self.image is None else f"{self.image!r} or {self.mask!r}"
            raise UsageError(
                f"the batch has no {sought} to augment, but {', '.join(map(repr, tensors)) or 'no tensor at all'}",
                "Name it with Pipeline(..., image=...).",
            )
        if self.mask is not None or not moves:
            return image, self.mask
        place = batch[image].shape[-2:]
        same = [k for k in tensors if k != image and batch[k].ndim in (3, 4) and batch[k].shape[-2:] == place]
        if len(same) > 1:
            raise UsageError(
                "more than one tensor of the batch may be the mask", "Name it with Pipeline(..., mask=...)."
            )
        return image, same[0] if same else None


def as_augmentation(given: Any) -> Augmentation | None:
    """``augment=`` as an Augmentation.

    Given are a Pipeline, transforms, a function of the batch, or one of ``(batch, seed, epoch, indices)``.
    """
    if given is None or isinstance(given, Pipeline):
        return given
    if isinstance(given, list | tuple):
        return Pipeline(given)
    if hasattr(given, "matrix") or (hasattr(given, "apply") and hasattr(given, "draws")):
        return Pipeline([given])
    if not callable(given):
        raise UsageError(
            f"augment is {type(given).__name__}", "Give transforms of fulltilt.feed.augment or a function."
        )
    if _asks_for_samples(given):  # it gets the numbers of samples, not of draws
        return lambda batch, seed, epoch, indices: given(batch, seed, epoch, sample_of(indices))
    return lambda batch, seed, epoch, indices: given(batch)  # noqa: ARG005


def _asks_for_samples(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False  # a builtin without a signature
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 4


def _move(
    image: torch.Tensor, mask: torch.Tensor | None, group: list[Geometric], draws: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    matrix, size = chain(group, draws, (int(image.shape[-2]), int(image.shape[-1])))
    if mask is not None:
        moved = pick(mask[:, None] if mask.ndim == 3 else mask, matrix, size)
        mask = moved[:, 0] if mask.ndim == 3 else moved
    if all(transform.exact for transform in group):
        return pick(image, matrix, size), mask
    return interpolate(_as_float(image), matrix, size), mask


def _as_float(image: torch.Tensor) -> torch.Tensor:
    return image.float() / 255 if image.dtype == torch.uint8 else image.float()


def _padded(rows: torch.Tensor, lacking: int) -> torch.Tensor:
    return torch.cat([rows, rows[:1].expand(lacking, *rows.shape[1:])]) if lacking else rows
