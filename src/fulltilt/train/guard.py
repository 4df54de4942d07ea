"""What to do about a bad step: decided on the host from the figures of each step. No torch.

The step itself was already skipped on the device when its loss or gradient was not finite; here it is counted, named,
and answered when it does not stay alone.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

# A spike is judged against the recent past; with fewer losses than this there is none.
WINDOW = 100
LEAST_HISTORY = 20


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one step left behind. ``bad``: it was skipped; ``loss_scale`` is None without fp16."""

    step: int
    loss: float
    grad_norm: float
    bad: bool
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from a step: go on, go back to the last checkpoint, or stop. ``why`` is for people."""

    action: Literal["go", "rollback", "stop"]
    why: str | None = None
    kind: Literal["non-finite", "overflow", "loss-scale", "spike"] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """When the guard acts. A spike lies ``spike_factor`` times the usual spread above the usual loss."""

    bad_steps_in_a_row: int = 5
    rollbacks: int = 1
    spike_factor: float | None = 10.0
    on_spike: Literal["report", "rollback"] = "report"
    loss_scale_floor: float = 2.0**-10


class Guard:
    """Counts bad steps and knows the recent losses. Its state is part of the checkpoint."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.skipped = 0
        self.in_a_row = 0
        self.rollbacks = 0
        self.recent: deque[float] = deque(maxlen=WINDOW)

    def judge(self, figures: StepFigures) -> Verdict:
        """The verdict on one step, in the order of the steps."""
        scale = figures.loss_scale
        if scale is not None and scale < self.limits.loss_scale_floor:
            return Verdict("stop", f"the loss scale fell to {scale:g} at step {figures.step}", "loss-scale")
        if figures.bad:
            self.skipped += 1
            if scale is not None and math.isfinite(figures.loss):
                # fp16 looks for its scale by overflowing now and then; only the scale's floor ends that.
                return Verdict("go", None, "overflow")
            self.in_a_row += 1
            what = f"loss {figures.loss:g}, gradient norm {figures.grad_norm:g}"
            why = f"step {figures.step} was skipped: {what}"
            if self.in_a_row < self.limits.bad_steps_in_a_row:
                return Verdict("go", why, "non-finite")
            return self._give_up(f"{why}; {self.in_a_row} such steps in a row", "non-finite")
        self.in_a_row = 0
        if self._is_spike(figures.loss):
            why = f"step {figures.step}: the loss jumped to {figures.loss:g}, far above the usual {self._usual():g}"
            return self._give_up(why, "spike") if self.limits.on_spike == "rollback" else Verdict("go", why, "spike")
        self.recent.append(figures.loss)
        return Verdict("go")

    def _give_up(self, why: str, kind: Literal["non-finite", "spike"]) -> Verdict:
        self.in_a_row = 0
        if self.rollbacks >= self.limits.rollbacks:
            return Verdict("stop", why, kind)
        self.rollbacks += 1
        return Verdict("rollback", why, kind)

    def _usual(self) -> float:
        return statistics.median(self.recent)

    def _is_spike(self, loss: float) -> bool:
        factor = self.limits.spike_factor
        if factor is None or len(self.recent) < LEAST_HISTORY:
            return False
        usual = self._usual()
        # A flat loss has no spread of its own; a tenth of its height keeps ordinary noise quiet, and spares nearly
        # every step the question after the spread.
        if loss <= usual + factor * 0.1 * abs(usual):
            return False
        return loss > usual + factor * statistics.median(abs(known - usual) for known in self.recent)

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "rollbacks": self.rollbacks,
            "recent": list(self.recent),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.skipped, self.in_a_row, self.rollbacks = state["skipped"], state["in_a_row"], state["rollbacks"]
        self.recent = deque(state["recent"], maxlen=WINDOW)
