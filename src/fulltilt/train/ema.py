"""An exponential moving average of the weights, kept on the device and swapped in for evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from fulltilt.train import shards


class Ema:
    """The averaged weights. Buffers are not averaged: evaluation uses the model's own."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self.decay = decay
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        """One step of the average. After a skipped step the weights are the old ones, which does no harm."""
        weights = [p.detach() for p in model.parameters()]
        torch._foreach_lerp_(list(self.average.values()), weights, 1.0 - self.decay)

    @contextlib.contextmanager
    def applied(self, model: torch.nn.Module) -> Iterator[None]:
        """Within it, ``model`` has the averaged weights. Nothing is copied."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    def _swap(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                # FSDP has noted where its part lies, so the values change places instead of the tensors.
                ours, averaged = shards.local(parameter.detach()), shards.local(self.average[name])
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
            tensor.copy_(shards.placed_like(state[name], tensor))
