"""Everything a run needs to go on exactly: named parts, each with its own state, frozen into one snapshot."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from fulltilt.errors import UsageError
from fulltilt.train import checkpoint, rng, shards, tensorfile, tree
from fulltilt.train.checkpoint import DamagedCheckpoint, Snapshot
from fulltilt.train.distributed import Group
from fulltilt.train.foreign import compare
from fulltilt.train.settings import TrainSettings
from fulltilt.train.writer import HostMemory

# What a rollback takes back. The rest (where the run is, what the guard has seen) goes on.
WEIGHT_PARTS = ("optimizer", "ema", "loss_scale")


class Part(Protocol):
    """Something with a state that the checkpoint keeps."""

    def state_dict(self) -> Any: ...  # noqa: D102
    def load_state_dict(self, state: Any, /) -> Any: ...  # noqa: D102


@dataclass(slots=True)
class Progress:
    """Where the run is. ``consumed`` is the position in the epoch of what was trained on, not of what was fetched."""

    step: int = 0
    epoch: int = 0
    consumed: int = 0
    samples: int = 0

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"step": self.step, "epoch": self.epoch, "consumed": self.consumed, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.step, self.epoch = state["step"], state["epoch"]
        self.consumed, self.samples = state["consumed"], state["samples"]


class MetricHistory:
    """The watched metric after each evaluation, and the best of them."""

    def __init__(self, mode: Literal["max", "min"]) -> None:
        self.mode = mode
        self.values: list[tuple[int, float]] = []

    def add(self, epoch: int, value: float) -> bool:
        """Note a value; True when it is the best so far."""
        before = self.best
        self.values.append((epoch, value))
        return self.best != before

    @property
    def best(self) -> float | None:
        """The best value so far; one that is no number is none."""
        values = [value for _, value in self.values if not math.isnan(value)]
        return (max if self.mode == "max" else min)(values, default=None)

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"values": [list(pair) for pair in self.values]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.values = [(epoch, value) for epoch, value in state["values"]]


class KeptSettings:
    """The settings and the number of samples a checkpoint was made with: a resume tells what is different now."""

    def __init__(self, settings: TrainSettings, samples: int | None) -> None:
        self.now = asdict(settings) | ({} if samples is None else {"samples": samples})
        self.before: dict[str, Any] = {}

    @property
    def changed(self) -> list[str]:
        """The settings that differ from the checkpoint's."""
        return [name for name in self.now if name in self.before and self.before[name] != self.now[name]]

    @property
    def changes(self) -> list[str]:
        """What differs from the checkpoint's settings, in words."""
        return [f"{name} {self.before[name]} → {self.now[name]}" for name in self.changed]

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self.now

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint: remembered, not taken over."""
        self.before = state


class RandomStates:
    """The random state of every rank."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: all ranks take part."""
        return {"ranks": self.group.gather(rng.capture(self.group.device))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint. A rank that was not there before keeps the state it was seeded with."""
        rank = self.group.ranks.rank
        if rank < len(state["ranks"]):
            rng.restore(state["ranks"][rank], self.group.device)


def freeze(
    model: torch.nn.Module,
    states: dict[str, Any],
    progress: Progress,
    metric: float | None,
    memory: HostMemory,
) -> Snapshot:
    """A snapshot on the host that later steps cannot change. Waits for the device once."""
    values, tensors = tree.flatten(states)
    weights = memory.freeze(model.state_dict(), "model")
    frozen = memory.freeze(tensors, "state")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Snapshot(progress.step, progress.epoch, metric, weights, frozen, values)


def help_freeze(model: torch.nn.Module, states: dict[str, Any]) -> None:
    """What the other ranks do while the first one freezes sharded tensors: give their parts, in the same order."""
    shards.take_part([*model.state_dict().values(), *tree.flatten(states)[1].values()])


def restore(folder: Path, model: torch.nn.Module, parts: dict[str, Part]) -> None:
    """Put every part back as the checkpoint has it.

    Raises DamagedCheckpoint when it lacks a part, UsageError listing the keys when it is of another model.
    """
    weights, state = checkpoint.load(folder)
    missing = [name for name in parts if name not in state]
    if missing:
        raise DamagedCheckpoint(
            f"{folder} lacks {', '.join(missing)}", "Take its weights alone with --resume-from, or start with --fresh."
        )
    fit = compare(model.state_dict(), weights, str(folder))
    if not fit.complete:
        remedy = "Give the settings of that model, another --out, or --fresh."
        raise UsageError(f"this is the checkpoint of another model: {'; '.join(fit.lines(3))}", remedy)
    model.load_state_dict(shards.all_placed_like(weights, model.state_dict()))
    for name, part in parts.items():
        part.load_state_dict(state[name])


def expected_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, averaged: bool) -> int:
    """About how large a checkpoint will be, before the optimizer has made its state: two moments for each weight.

    Raises UsageError for a model that no checkpoint can hold.
    """
    weights = tensorfile.size_bytes(_checked(model.state_dict()))
    trained: int = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
    moments = 1 if isinstance(optimizer, torch.optim.SGD) else 2
    return weights + trained * moments + (trained if averaged else 0) + 2**16


def _checked(weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            kind = value.layout if isinstance(value, torch.Tensor) else type(value).__name__
            raise UsageError(
                f"cannot save {name} of the model: {kind} is not an ordinary tensor",
                "Leave it out of the model's state_dict().",
            )
    return weights
