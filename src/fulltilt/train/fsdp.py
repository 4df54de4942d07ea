"""Weights, gradients and optimizer state divided among the ranks (FSDP2), for models that do not fit into one GPU.

Each block is made whole for its own forward and backward only. Every forward therefore needs all ranks at once: ranks
with less to do in a step repeat a piece of it at a weight of zero. A rank that runs out of memory cannot be waited for
within a step, unlike with replicas: the run ends, and resumes with smaller pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from fulltilt.train.distributed import Group, LossModule, Piece, SingleProcess


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or all of it when each rank has a part. Then all ranks take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor. Changes of it are changes of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Our part of a whole ``tensor``, as ``like`` is divided among the ranks; no other rank is asked."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


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
            index: {name: _as_parameter(name, value, parameters[index]) for name, value in entry.items()}
            for index, entry in state["state"].items()
            if index < len(parameters)
        }
        self.optimizer.load_state_dict({"param_groups": state["param_groups"], "state": entries})
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group.update(rate)


# Of torch's own optimizers. Others keep moments in forms of their own.
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def _as_parameter(name: str, value: Any, parameter: torch.Tensor) -> Any:
    moment = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    if not moment and name in _MOMENTS:
        raise ValueError(f"{name} is not of its parameter's shape")
    return sharded_like(value, parameter) if moment else value


# --------------------------------------------------------------------------- the sharded model


# Below this a block is gathered together with its neighbours: many small messages are slower than one.
LEAST_BLOCK_PARAMETERS = 100_000


class Sharded(SingleProcess):
    """The model divided among the ranks, block by block. The loss around it is the root of the blocks."""

    lockstep = True

    def __init__(self, whole: LossModule, group: Group) -> None:
        super().__init__(whole)
        self.divisor = group.ranks.world
        self._group = group
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # takes its time to import

        mesh = init_device_mesh(group.device.type, (group.ranks.world,))
        for block in blocks(whole.model):
            fully_shard(block, mesh=mesh)
        self._root = fully_shard(whole, mesh=mesh)

    def pieces(self, own: list[Piece]) -> list[Piece]:
        """See SingleProcess. As many as the rank with the most of them has; a rank without any borrows one."""
        most, fewest = (int(abs(count)) for count in self._group.agree([len(own), -len(own)]))
        spare = own[-1][0] if own else None
        if fewest == 0:
            lent = [own[0][0] if own else None]
            dist.broadcast_object_list(lent, src=self._group.gather(len(own)).index(most))
            spare = spare if own else lent[0]
        return [*own, *[(spare, 0)] * (most - len(own))]

    def evaluate(self, loss: Any, piece: Any) -> Any:
        """See SingleProcess."""
        outcome = self._whole(piece, loss)
        self._root.reshard()  # what belongs to no block stays whole until a backward, and here none follows
        return outcome

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """See SingleProcess."""
        squared = torch.nn.utils.get_total_norm([local_shard(gradient) for gradient in gradients]).square()
        dist.all_reduce(squared)
        return squared.sqrt()


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What is gathered at a time, inner ones first: members of the model's lists and sequences that are large enough.

    That is how transformers and convolutional networks keep their blocks. Single layers count where there are no
    blocks. What is in none of them is gathered with the whole.
    """
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList | torch.nn.Sequential)]
    members = list(dict.fromkeys(child for parent in lists for child in parent.children()))
    large = [m for m in members if sum(p.numel() for p in m.parameters()) >= LEAST_BLOCK_PARAMETERS]
    depth = {module: name.count(".") for name, module in model.named_modules()}
    return sorted([m for m in large if any(m.children())] or large, key=lambda m: -depth[m])
