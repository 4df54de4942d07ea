"""Gradients summed over the ranks while backward still runs, in buckets, in a way that survives a failed backward.

DistributedDataParallel does the same but cannot be brought back once backward has raised on one rank: the others wait
in an all-reduce that never comes. Here the rank that ran out of memory completes the round with what it has, all ranks
learn of the failure, and the step is done again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from fulltilt.train.distributed import Group

# Small enough that the first sum starts early in backward, large enough to use the whole link.
BUCKET_BYTES = 25 * 2**20


class GradientExchange:
    """Owns the gradients of the trainable parameters: views into a few flat buffers, summed over the ranks in place."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], group: Group) -> None:
        self.group = group
        self._armed = False
        self._next = 0
        self._works: list[Any] = []
        self._flats: list[torch.Tensor] = []
        self._members: list[list[torch.nn.Parameter]] = []
        self._missing: list[int] = []
        self._hooks = []
        # Backward reaches the last parameters first.
        for members in _buckets(list(parameters)[::-1]):
            index = len(self._flats)
            self._flats.append(_flat_gradients(members))
            self._members.append(members)
            for parameter in members:
                hook = parameter.register_post_accumulate_grad_hook(self._arrived(index))  # type: ignore[no-untyped-call, unused-ignore]
                self._hooks.append(hook)

    def zero(self) -> None:
        """Set all gradients to zero; they stay views of the buffers."""
        for flat, members in zip(self._flats, self._members, strict=True):
            flat.zero_()
            _attach(flat, members)

    def arm(self) -> None:
        """The next backward is the last of its step: sum each bucket as soon as it is full."""
        self._armed = True
        self._next = 0
        self._works = []
        self._missing = [len(members) for members in self._members]

    def finish(self, loss: torch.Tensor) -> None:
        """Sum what has not been summed yet and ``loss`` with it, then let the device wait for the sums.

        Called after a failed backward too: the other ranks wait for the same number of sums.
        """
        if not self._armed:
            self.arm()
        self._launch(upto=len(self._flats))
        self._works.append(dist.all_reduce(loss, async_op=True))
        for work in self._works:
            work.wait()
        self._armed = False

    def close(self) -> None:
        """Give the parameters back without hooks or buffers."""
        for hook in self._hooks:
            hook.remove()
        for members in self._members:
            for parameter in members:
                parameter.grad = None

    def _arrived(self, index: int) -> Any:
        def hook(_parameter: torch.Tensor) -> None:
            if not self._armed:
                return
            self._missing[index] -= 1
            # Every rank sums its buckets in the same order, whatever the order in which they fill.
            full = self._next
            while full < len(self._missing) and self._missing[full] <= 0:
                full += 1
            self._launch(upto=full)

        return hook

    def _launch(self, upto: int) -> None:
        while self._next < upto:
            self._works.append(dist.all_reduce(self._flats[self._next], async_op=True))
            self._next += 1


def _buckets(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    buckets: list[list[torch.nn.Parameter]] = []
    size = BUCKET_BYTES
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if size + parameter.nbytes > BUCKET_BYTES or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets


def _flat_gradients(members: list[torch.nn.Parameter]) -> torch.Tensor:
    first = members[0]
    flat = torch.zeros(sum(p.numel() for p in members), dtype=first.dtype, device=first.device)
    _attach(flat, members)
    return flat


def _attach(flat: torch.Tensor, members: list[torch.nn.Parameter]) -> None:
    offset = 0
    for parameter in members:
        # The parameter's own strides, so that channels-last weights get channels-last gradients.
        parameter.grad = flat.as_strided(parameter.size(), parameter.stride(), offset)
        offset += parameter.numel()
