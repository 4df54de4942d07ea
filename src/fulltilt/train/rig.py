"""Everything a run works with, in one place."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import MachineError
from fulltilt.train import shards
from fulltilt.train.distributed import Group, same_everywhere
from fulltilt.train.ema import Ema
from fulltilt.train.guard import Guard
from fulltilt.train.job import Job
from fulltilt.train.precision import LossScale, Precision
from fulltilt.train.progress import Screen
from fulltilt.train.schedule import Stage
from fulltilt.train.settings import TrainSettings
from fulltilt.train.sources import Source
from fulltilt.train.state import KeptSettings, MetricHistory, Part, Progress, RandomStates
from fulltilt.train.step import MicroBatch, Stepper
from fulltilt.train.totals import Totals
from fulltilt.train.writer import Writer


@dataclass(slots=True)
class Rig:
    """Everything a run works with. ``source`` and the stepper's optimizer change with the stage."""

    job: Job
    settings: TrainSettings
    out: Path
    device: torch.device
    group: Group
    model: torch.nn.Module
    compiled: Callable[..., Any]
    precision: Precision
    stages: tuple[Stage, ...]
    source: Source
    eval_source: Source | None
    stepper: Stepper
    scale: LossScale
    micro: MicroBatch
    eval_micro: MicroBatch
    ema: Ema | None
    totals: Totals
    guard: Guard
    history: MetricHistory
    progress: Progress
    kept_settings: KeptSettings
    writer: Writer
    screen: Screen
    lock: contextlib.ExitStack
    stage_index: int = -1
    # What the job itself had frozen stays so; what the present epoch trains.
    brought_frozen: frozenset[str] = frozenset()
    trained: frozenset[str] | None = None

    @property
    def root(self) -> Path:
        """Where the checkpoints are."""
        return self.writer.root

    @property
    def epochs(self) -> int:
        """Epochs of all stages together."""
        return sum(stage.epochs for stage in self.stages)

    def gpu_names(self) -> list[str]:
        """The names of all ranks' GPUs, the first rank's first; none on the CPU."""
        if self.device.type != "cuda":
            return []
        return [str(name) for name in self.group.gather(torch.cuda.get_device_name(self.device))]

    def parts(self) -> dict[str, Part]:
        """What a checkpoint holds besides the model."""
        parts: dict[str, Part] = {
            "progress": self.progress,
            "optimizer": shards.OptimizerState(self.stepper.optimizer, self.screen.warn),
            "loss_scale": self.scale,
            "random": RandomStates(self.group),
            "totals": self.totals,
            "guard": self.guard,
            "micro_batch": self.micro,
            "eval_micro_batch": self.eval_micro,
            "history": self.history,
            "settings": self.kept_settings,
        }
        if self.ema is not None:
            parts["ema"] = self.ema
        return parts

    def close(self, *, failed: bool = False) -> None:
        """End the loader's workers and leave the group of ranks; ``failed``: the others may not know yet."""
        for data in (self.source, self.eval_source):
            if data is not None:
                data.close()
        if self.stepper.replaying is not None:
            self.stepper.replaying.undo()
        for name, parameter in self.model.named_parameters():  # a model may be trained further by another call
            parameter.requires_grad_(name not in self.brought_frozen)
        self.group.close(failed=failed)
        self.lock.close()

    def share_buffers(self) -> None:
        """Give every rank the first rank's buffers: running statistics differ, and only one set counts."""
        self.group.copy_from_first(list(self.model.buffers()))

    def broken_weights(self) -> str | None:
        """The first trained parameters with values that are not finite, in words. Waits for the device."""
        local = [(name, shards.local(p.detach())) for name, p in self.model.named_parameters() if p.requires_grad]
        named = [(name, tensor) for name, tensor in local if tensor.numel()]  # a shard may be empty
        largest = torch._foreach_norm([tensor for _, tensor in named], math.inf)  # which no large tensor overflows
        norms = torch.stack([one.float() for one in largest] or [torch.zeros(())])
        names = [name for (name, _), whole in zip(named, torch.isfinite(norms).tolist(), strict=False) if not whole]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3])}{more}" if names else None

    def check_drift(self) -> None:
        """Raise MachineError when the ranks no longer hold the same weights."""
        if not self.stepper.placement.lockstep and not same_everywhere(list(self.model.parameters()), self.group):
            raise MachineError(
                f"the ranks' weights differ at step {self.progress.step}: one GPU computed wrongly",
                "Resume from the last checkpoint, and have that machine's memory checked.",
            )
