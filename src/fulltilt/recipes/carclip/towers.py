"""A CLIP model as this recipe takes it: pictures and tokens in, embeddings of length one out."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch.nn import functional

# What every CLIP model was trained with.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class Towers(torch.nn.Module, abc.ABC):
    """Two towers and a temperature. ``image_part`` and ``text_part`` are patterns of parameter names."""

    image_part: ClassVar[tuple[str, ...]]
    text_part: ClassVar[tuple[str, ...]]

    @property
    @abc.abstractmethod
    def log_scale(self) -> torch.nn.Parameter:
        """The logarithm of the factor on cosines; its inverse is the temperature."""

    @abc.abstractmethod
    def image_features(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, width] of normalised pictures."""

    @abc.abstractmethod
    def text_features(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, width] of token numbers."""

    @abc.abstractmethod
    def gradient_checkpointing_enable(self) -> None:
        """Compute activations again in backward."""

    @abc.abstractmethod
    def save(self, folder: Path) -> None:
        """Leave the model where others can load it."""


class DualEncoder(torch.nn.Module):
    """Both towers behind one ``forward``, so that torch.compile and checkpointing see one module."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, towers: Towers, mean: tuple[float, ...] = CLIP_MEAN, std: tuple[float, ...] = CLIP_STD) -> None:
        super().__init__()
        self.towers = towers
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)

    @property
    def log_scale(self) -> torch.nn.Parameter:
        """See Towers."""
        return self.towers.log_scale

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of pictures (uint8, or float in [0, 1]) and of their captions."""
        return self.embed_images(images), self.embed_texts(tokens)

    def embed_images(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, width], float32, each of length one."""
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images
        features = self.towers.image_features((pixels - self.mean) / self.std)
        return functional.normalize(features.float(), dim=-1)

    def embed_texts(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, width], float32, each of length one."""
        return functional.normalize(self.towers.text_features(tokens.long()).float(), dim=-1)

    def gradient_checkpointing_enable(self) -> None:
        """For the engine's setting of that name."""
        self.towers.gradient_checkpointing_enable()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with what belongs to it. ``tokenise`` gives int32 [texts, length], all of one length."""

    model: DualEncoder
    tokenise: Callable[[list[str]], torch.Tensor]
    image_size: int
    about: str
    pretrained: bool
