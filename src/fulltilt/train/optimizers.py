"""Optimizers by name, the learning-rate schedule (warm-up, cosine, linear, constant), and EMA of the weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from fulltilt.errors import UsageError
from fulltilt.train.config import TrainSettings
from fulltilt.train.distributed import local_shard, sharded_like


def build(model: torch.nn.Module, settings: TrainSettings, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of ``settings`` over all parameters; frozen ones get no gradient."""
    groups = decay_groups(model, settings.weight_decay)
    fused = device.type == "cuda"
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=False, fused=fused)
    if settings.optimizer == "adam":
        return torch.optim.Adam(groups, lr=settings.lr, fused=fused)
    if settings.optimizer == "adamw8bit":
        try:
            import bitsandbytes
        except ImportError as error:
            remedy = "Install it with: pip install bitsandbytes, or take optimizer: adamw."
            raise UsageError("optimizer: adamw8bit needs bitsandbytes", remedy) from error
        made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=settings.lr)
        return made
    return torch.optim.AdamW(groups, lr=settings.lr, fused=fused)


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: weight decay for matrices and kernels, none for biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def step_unless(optimizer: torch.optim.Optimizer, bad: torch.Tensor) -> None:
    """Step, unless ``bad`` (0.0 or 1.0 on the device). Waits for the device only if the optimizer is not fused."""
    if bad.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False):  # fused: it reads the flag itself
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = bad  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(bad):
        optimizer.step()


# --------------------------------------------------------------------------- EMA


class Ema:
    """Exponential moving average of the weights. Buffers are not averaged."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self.decay = decay
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        """Update the average; also after a skipped step, with the old weights."""
        weights = [p.detach() for p in model.parameters()]
        torch._foreach_lerp_(list(self.average.values()), weights, 1.0 - self.decay)

    @contextlib.contextmanager
    def applied(self, model: torch.nn.Module) -> Iterator[None]:
        """Swap the averaged weights into ``model``, without a copy."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    def _swap(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                # FSDP holds the address of its shard, so the values are swapped instead of the tensors.
                ours, averaged = local_shard(parameter.detach()), local_shard(self.average[name])
                kept = ours.clone()
                ours.copy_(averaged)
                averaged.copy_(kept)
            else:
                parameter.data, self.average[name] = self.average[name], parameter.data

    def state_dict(self) -> dict[str, torch.Tensor]:
        """For the checkpoint."""
        return dict(self.average)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """From the checkpoint."""
        for name, tensor in self.average.items():
            tensor.copy_(sharded_like(state[name], tensor))


# --------------------------------------------------------------------------- the learning rate of a step


def learning_rate(
    step: int,
    *,
    total_steps: int,
    peak: float,
    floor: float = 0.0,
    warmup_steps: int = 0,
    shape: Literal["cosine", "linear", "constant"] = "cosine",
) -> float:
    """The rate of step ``step`` (from 0): linear up to ``peak`` in the warm-up, then by ``shape`` down to ``floor``.

    The last warm-up step has the peak; the last step, and any after it, the floor.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if shape == "constant":
        return peak
    left = max(total_steps - warmup_steps - 1, 1)
    done = min((step - warmup_steps) / left, 1.0)
    share = 1.0 - done if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (peak - floor) * share
