"""What a run tells its caller: after each step, and at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fulltilt.train.checkpoint import Checkpoint
from fulltilt.train.rig import Rig


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: its steps, its last metrics, and where its newest checkpoint is."""

    steps: int
    epochs: int
    metrics: dict[str, float]
    best: float | None
    checkpoint: Checkpoint | None
    skipped_steps: int


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What a step hook sees: the run's parts after the step."""

    step: int
    epoch: int
    rig: Rig
    names: Callable[[], str]

    @property
    def samples(self) -> str:
        """The names of its samples; put together only when asked for."""
        return self.names()


Hook = Callable[[StepEnd], None]
