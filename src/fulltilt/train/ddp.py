"""Replicas of the model on all ranks, kept alike by DistributedDataParallel; a backward that failed does not end them.

DDP sums the gradients bucket by bucket while backward still runs. It expects that every parameter gets its gradient:
the other ranks wait for a bucket that never comes when one rank runs out of memory, has no sample in a step, or leaves
a parameter out. Such a rank completes the round with a backward of nothing through the parameters that are missing.
All ranks then learn of the failure, DDP is ready for the next backward, and the step is done again.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fulltilt.train.distributed import Group, LossModule, Piece, zero_loss


class Replicated:
    """The loss within DDP. ``use`` wraps it anew: DDP takes the trainable parameters as they are when it is made."""

    lockstep = False

    def __init__(self, whole: LossModule, group: Group) -> None:
        self.divisor = group.ranks.world
        self._whole, self._group = whole, group
        self._ddp: DistributedDataParallel | None = None
        self._parameters: Sequence[torch.nn.Parameter] = ()
        self._hooks: list[Any] = []
        self._missing: set[int] = set()
        self._unused: list[int] = []
        self._summing = False

    def use(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """See Placement."""
        self._let_go()
        self._parameters = parameters
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived(i)) for i, p in enumerate(parameters)]  # type: ignore[no-untyped-call, unused-ignore]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 has a new name for the next line
            self._ddp = DistributedDataParallel(
                self._whole,
                broadcast_buffers=False,  # the engine does, when it evaluates or saves
                gradient_as_bucket_view=True,
                init_sync=False,  # the engine has given every rank the same weights
            )
        # DDP settles its buckets after the first backward. Sums over three or more ranks depend on them in the last
        # bit, so they have to be settled before the first step: a resumed run would differ from one that went on.
        for _ in range(2):
            self._ddp(None).backward()

    def pieces(self, own: list[Piece]) -> list[Piece]:
        """See Placement."""
        return own

    def zero_gradients(self) -> None:
        """See Placement. They stay views of DDP's buckets."""
        self._summing = False
        torch._foreach_zero_([p.grad for p in self._parameters if p.grad is not None])

    def loss_of(self, piece: Any, *, last: bool) -> Any:
        """See Placement."""
        assert self._ddp is not None
        self._ddp.require_backward_grad_sync = last  # what DDP's no_sync() sets
        outcome = self._ddp(piece)
        if last:
            self._missing = set(range(len(self._parameters)))
            self._summing = True
        return outcome

    def evaluate(self, loss: Any, piece: Any) -> Any:
        """See Placement. Replicas need no word from each other for that."""
        return self._whole(piece, loss)

    def finish(self, loss: torch.Tensor) -> None:
        """See Placement."""
        if self._summing:
            self._unused = sorted(self._missing)
            if self._unused:
                zero_loss(self._parameters[index] for index in self._unused).backward()  # type: ignore[no-untyped-call, unused-ignore]
        else:
            self._unused = list(range(len(self._parameters)))
            self.loss_of(None, last=True).backward()
        dist.all_reduce(loss)
        loss /= self.divisor

    @property
    def left_out(self) -> bool:
        """See Placement."""
        return bool(self._unused)

    def forget_left_out(self) -> None:
        """See Placement."""
        unused = set(self._unused)
        used = self._group.agree([float(index not in unused) for index in range(len(self._parameters))])
        for parameter, somewhere in zip(self._parameters, used, strict=True):
            if not somewhere:
                parameter.grad = None

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """See Placement."""
        return torch.nn.utils.get_total_norm(gradients)

    def _arrived(self, index: int) -> Any:
        def hook(_parameter: torch.Tensor) -> None:
            self._missing.discard(index)

        return hook

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.grad = None
        self._ddp = None
