"""Guards against bad steps (NaN, loss spikes), out-of-memory errors and dead loader workers."""

from __future__ import annotations

import math
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, Literal

import torch

from fulltilt.errors import DoesNotFit, MachineError
from fulltilt.feed.worker_pool import worker_died
from fulltilt.train.config import TrainSettings

# A spike is judged against the last losses, once there are enough of them.
WINDOW = 100
LEAST_HISTORY = 20


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of one step. ``bad``: it was skipped; ``loss_scale`` is None without fp16."""

    step: int
    loss: float
    grad_norm: float
    bad: bool
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class GuardAction:
    """What to do after a step: go on, roll back to the last checkpoint, or stop. ``why`` is printed."""

    action: Literal["go", "rollback", "stop"]
    why: str | None = None


class SavedAttributes:
    """An object whose ``kept`` attributes are saved in the checkpoint."""

    kept: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint."""
        for name in self.kept:
            setattr(self, name, state[name])


class Guard(SavedAttributes):
    """Counts bad steps and keeps the recent losses."""

    kept = ("skipped", "in_a_row", "rollbacks", "recent")

    def __init__(self, settings: TrainSettings) -> None:
        self.limits = settings
        self.skipped = self.in_a_row = self.rollbacks = 0
        self.recent: list[float] = []

    def judge(self, figures: StepFigures) -> GuardAction:
        """What to do after one step; called for each, in order."""
        scale = figures.loss_scale
        if scale is not None and scale < self.limits.loss_scale_floor:
            return GuardAction("stop", f"the loss scale fell to {scale:g} at step {figures.step}")
        if figures.bad:
            self.skipped += 1
            if scale is not None and math.isfinite(figures.loss):
                # fp16 finds its scale by overflowing now and then.
                return GuardAction("go")
            self.in_a_row += 1
            what = f"loss {figures.loss:g}, gradient norm {figures.grad_norm:g}"
            why = f"step {figures.step} was skipped: {what}"
            if self.in_a_row < self.limits.bad_steps_in_a_row:
                return GuardAction("go", why)
            return self._give_up(f"{why}; {self.in_a_row} such steps in a row")
        self.in_a_row = 0
        jumped: str | None = None
        if self._is_spike(figures.loss):
            jumped = f"step {figures.step}: the loss jumped to {figures.loss:g}, far above the usual {self._usual():g}"
        self.recent = [*self.recent[1 - WINDOW :], figures.loss]  # a spike, too: it may be a new level
        return self._give_up(jumped) if jumped and self.limits.on_spike == "rollback" else GuardAction("go", jumped)

    def _give_up(self, why: str) -> GuardAction:
        self.in_a_row = 0
        if self.rollbacks >= self.limits.rollbacks:
            return GuardAction("stop", why)
        self.rollbacks += 1
        return GuardAction("rollback", why)

    def _usual(self) -> float:
        return statistics.median(self.recent)

    def _is_spike(self, loss: float) -> bool:
        factor = self.limits.spike_factor
        if factor is None or len(self.recent) < LEAST_HISTORY:
            return False
        usual = self._usual()
        # Within a tenth of the usual loss nothing is a spike: a flat loss has no spread, and the median is spared.
        if loss <= usual + factor * 0.1 * abs(usual):
            return False
        return loss > usual + factor * statistics.median(abs(known - usual) for known in self.recent)


# --------------------------------------------------------------------------- memory


class RankDoesNotFit(DoesNotFit):
    """Memory ran out on this rank only."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host, ran out of memory for a tensor."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "CUDNN_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


class MicroBatch(SavedAttributes):
    """The most samples that a rank puts through the model at once; None until memory has run out."""

    kept = ("most",)

    def __init__(self, *, splittable: bool) -> None:
        self.most: int | None = None
        self.splittable = splittable

    def halve(self, largest: int, where: str) -> None:
        """Halve the size that ran out of memory. Raises DoesNotFit when it cannot be halved."""
        if largest <= 1:
            raise DoesNotFit(
                f"memory ran out {where} with a single sample",
                "Use gradient_checkpointing, precision: bf16, optimizer: adamw8bit, smaller inputs or a smaller model.",
            )
        if not self.splittable:
            raise DoesNotFit(
                f"memory ran out {where} with {largest} samples, and this loss compares the samples of a batch",
                "Lower batch_size: splitting the batch would change what is trained.",
            )
        self.most = (largest + 1) // 2


# --------------------------------------------------------------------------- loader workers


def explain_dead_worker(error: BaseException, workers: Sequence[BaseProcess] = ()) -> MachineError | None:
    """The cause and the fix when ``error`` is of a dead DataLoader worker; None for any other error.

    The exit codes of ``workers`` say more than torch's message.
    """
    text = str(error)
    if not workers and "DataLoader worker" not in text:
        return None
    if workers:
        wait([process.sentinel for process in workers], timeout=0.2)  # a dying one may need a moment
    # First the code in torch's message: other workers may have been killed after that one.
    codes = [-number for number in signal.Signals if f"killed by signal: {signal.strsignal(number)}" in text]
    codes += [code for process in workers if (code := process.exitcode)]
    if "shared memory" in text or "bus error" in text.lower():
        codes.append(-signal.SIGBUS)
    told = "DataLoader worker" in text and ("unexpectedly" in text or "killed by signal" in text)
    # A worker that dies while its batch is fetched breaks the connection before torch notices.
    cut_off = isinstance(error, OSError | EOFError) and codes
    if -signal.SIGBUS in codes:
        return worker_died(-signal.SIGBUS)
    return worker_died(codes[0] if codes else None) if told or cut_off else None
