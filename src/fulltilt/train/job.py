"""A training job as the engine takes it: a model, a loss, data, and what to watch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fulltilt.train.schedule import Stage
from fulltilt.train.settings import TrainSettings

Loss = Callable[[torch.nn.Module, Any], "torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]"]
MakeOptimizer = Callable[[torch.nn.Module, TrainSettings, torch.device], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained.

    ``loss(model, batch)`` returns the mean loss over the batch, and with it, if you like, a dict of metrics as means
    over the batch. ``data`` and ``eval_data`` are map-style data sets (``len`` and ``[i]``: shuffled, divided and
    resumed exactly by the engine) or iterables of ready batches. ``splittable`` is False for a loss that compares the
    samples of a batch with each other (contrastive): halving such a batch would change what is trained.
    """

    model: torch.nn.Module
    loss: Loss
    data: Sequence[Any] | torch.utils.data.Dataset[Any] | Iterable[Any]
    eval_data: Sequence[Any] | torch.utils.data.Dataset[Any] | Iterable[Any] | None = None
    eval_loss: Loss | None = None
    optimizer: MakeOptimizer | None = None
    stages: tuple[Stage, ...] = ()
    collate: Callable[[list[Any]], Any] | None = None
    on_stage: Callable[[Stage, torch.nn.Module], None] | None = None
    splittable: bool = True
    name: str = "training"
