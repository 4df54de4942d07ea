"""How the learning rate and the trainable part move over a run: pure functions of where the run is."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from fulltilt.train.config import TrainSettings


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of epochs with its own learning rate, batch and trainable part. ``None`` takes the run's setting.

    ``frozen`` are patterns of parameter names (``backbone.*``); ``unfreeze`` gives, for an epoch of the stage, a
    pattern that becomes trainable from then on. ``fresh_optimizer`` forgets the momentum of the stage before.
    """

    name: str
    epochs: int
    lr: float | None = None
    min_lr: float | None = None
    warmup_epochs: float | None = None
    batch_size: int | None = None
    accumulation: int | None = None
    frozen: tuple[str, ...] = ()
    unfreeze: tuple[tuple[int, str], ...] = ()
    fresh_optimizer: bool = True


def stage_at(stages: tuple[Stage, ...], epoch: int) -> tuple[int, int]:
    """The index of the stage that ``epoch`` of the run lies in, and the epoch within it."""
    first = 0
    for index, stage in enumerate(stages):
        if epoch < first + stage.epochs or index == len(stages) - 1:
            return index, epoch - first
        first += stage.epochs
    raise ValueError("a run has at least one stage")


def trainable(
    names: Iterable[str], stage: Stage, epoch_in_stage: int, initially_frozen: Collection[str] = ()
) -> set[str]:
    """The names of the parameters that move in this epoch of the stage.

    What the job brought along frozen moves only where ``unfreeze`` names it.
    """
    thawed = [pattern for epoch, pattern in stage.unfreeze if epoch_in_stage >= epoch]
    return {
        name
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in thawed)
        or not (name in initially_frozen or any(fnmatchcase(name, pattern) for pattern in stage.frozen))
    }


def learning_rate(
    step: int,
    *,
    total_steps: int,
    peak: float,
    floor: float = 0.0,
    warmup_steps: int = 0,
    shape: Literal["cosine", "linear", "constant"] = "cosine",
) -> float:
    """The rate for step ``step`` (from 0): a line up to ``peak`` over the warm-up, then by ``shape`` down to ``floor``.

    The last warm-up step runs at the peak and the last step of all at the floor; later steps stay there.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if shape == "constant":
        return peak
    left = max(total_steps - warmup_steps - 1, 1)
    done = min((step - warmup_steps) / left, 1.0)
    share = 1.0 - done if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (peak - floor) * share


def stage_rate(settings: TrainSettings, stage: Stage, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """The rate of a stage's step, by the stage's own settings where it has some and the run's where not."""
    warmup_epochs = settings.warmup_epochs if stage.warmup_epochs is None else stage.warmup_epochs
    warmup_steps = round(warmup_epochs * steps_per_epoch) if settings.warmup_steps is None else settings.warmup_steps
    return learning_rate(
        step,
        total_steps=total_steps,
        peak=settings.lr if stage.lr is None else stage.lr,
        floor=settings.min_lr if stage.min_lr is None else stage.min_lr,
        warmup_steps=warmup_steps,
        shape=settings.schedule,
    )
