"""Sharded tensors on their way to and from a checkpoint, which holds whole ones: it fits any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or all of it when each rank has a part. Then all ranks take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def take_part(tensors: Iterable[torch.Tensor]) -> None:
    """Give our parts to a rank that makes the same tensors whole, in the same order. One at a time is in memory."""
    for tensor in tensors:
        whole(tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor. Changes of it are changes of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Our part of a whole ``tensor``, as ``like`` is divided among the ranks; no other rank is asked."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def all_placed_like(tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Named whole tensors as those of the same name in ``like`` are divided."""
    return {name: placed_like(tensor, like[name]) if name in like else tensor for name, tensor in tensors.items()}


class OptimizerState:
    """An optimizer whose moments are divided as its parameters are, and whole in the checkpoint."""

    def __init__(self, optimizer: torch.optim.Optimizer, warn: Callable[[str], None]) -> None:
        self.optimizer = optimizer
        self._warn = warn

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"kind": type(self.optimizer).__name__, **self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint. The state of another kind of optimizer is not taken, which is told."""
        own = type(self.optimizer).__name__
        kind = state.get("kind", own)
        groups = self.optimizer.param_groups
        if kind != own or [len(g["params"]) for g in groups] != [len(g["params"]) for g in state["param_groups"]]:
            what = f"of {kind}, not {own}" if kind != own else "for other groups of parameters"
            self._warn(f"the optimizer starts from nothing: the checkpoint's is {what}")
            return
        parameters = [p for group in groups for p in group["params"]]
        rates = [{"lr_factor": group["lr_factor"]} if "lr_factor" in group else {} for group in groups]
        entries = {
            index: {name: _as_parameter(value, parameters[index]) for name, value in entry.items()}
            for index, entry in state["state"].items()
            if index < len(parameters)
        }
        self.optimizer.load_state_dict({"param_groups": state["param_groups"], "state": entries})
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group.update(rate)


def _as_parameter(value: Any, parameter: torch.Tensor) -> Any:
    moment = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return placed_like(value, parameter) if moment else value
