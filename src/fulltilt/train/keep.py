"""Which checkpoints stay: the last n and the best k by metric. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol


class Rated(Protocol):
    """A checkpoint as the policy sees it."""

    @property
    def step(self) -> int: ...  # noqa: D102
    @property
    def metric(self) -> float | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Keep the ``last`` newest and the ``best`` ones by metric; ``mode`` says which end of the metric is good."""

    last: int = 2
    best: int = 1
    mode: Literal["max", "min"] = "max"

    @property
    def most(self) -> int:
        """The largest number of checkpoints that this policy keeps at once."""
        return self.last + self.best


def steps_to_delete(checkpoints: Collection[Rated], policy: KeepPolicy) -> list[int]:
    """The steps whose checkpoints go, oldest first. The newest always stays; equal metrics favour the older one."""
    by_age = sorted(checkpoints, key=lambda c: c.step)
    rated = [(c.metric, c.step) for c in by_age if c.metric is not None and c.metric == c.metric]
    sign = -1.0 if policy.mode == "max" else 1.0
    rated.sort(key=lambda pair: (sign * pair[0], pair[1]))
    kept = {c.step for c in by_age[-max(policy.last, 1) :]} | {step for _, step in rated[: policy.best]}
    return [c.step for c in by_age if c.step not in kept]
