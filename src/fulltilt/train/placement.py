"""Where the weights are, and how the gradients of all ranks come together.

In one process (here), as replicas (`replicated.py`), or divided among the ranks (`sharded.py`).

A placement calls the loss, so that it sees every use of the model within it, whichever of its parts the loss calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from fulltilt.train.job import Loss

Piece = tuple[Any, int]


class Placement(Protocol):
    """Brings the gradients of one step together over the ranks."""

    @property
    def divisor(self) -> int:
        """Losses and gradients come out divided by this; they have to go in multiplied by it."""

    @property
    def left_out(self) -> bool:
        """Whether this rank left some parameters out of its step."""

    @property
    def lockstep(self) -> bool:
        """Every forward needs all ranks at once, also those without data, and one that failed cannot be repeated."""

    def use(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """These are trained from now on. All ranks take part."""

    def pieces(self, own: list[Piece]) -> list[Piece]:
        """What this rank computes in a step, each piece with its number of samples."""

    def zero_gradients(self) -> None:
        """Begin a step."""

    def loss_of(self, piece: Any, *, last: bool) -> Any:
        """What the job's loss says about ``piece``; ``last``: it is the last of its step."""

    def evaluate(self, loss: Any, piece: Any) -> Any:
        """What ``loss`` says about ``piece``, without gradients."""

    def finish(self, loss: torch.Tensor) -> None:
        """After the last backward, or one that failed: complete the exchange, and average ``loss`` in place."""

    def forget_left_out(self) -> None:
        """Take the gradient from parameters that every rank left out, as in one process. All ranks take part."""

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm of all gradients together."""


class LossModule(torch.nn.Module):
    """The loss with the model inside it."""

    def __init__(self, model: torch.nn.Module, compiled: Callable[..., Any], loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._compiled = (compiled,)  # in a tuple: as a module of ours it would bring every weight a second time

    def forward(self, piece: Any, loss: Any = None) -> Any:
        """The job's loss of ``piece``, or another. None stands for no data: a zero that every weight takes part in."""
        return nothing(self.model.parameters()) if piece is None else (loss or self.loss)(self._compiled[0], piece)  # type: ignore[arg-type]


def nothing(parameters: Any) -> torch.Tensor:
    """A zero whose backward adds nothing to the gradient of each of ``parameters``, but reaches all of them."""
    return torch.stack([parameter.sum().float() * 0 for parameter in parameters if parameter.requires_grad]).sum()


class OneProcess:
    """All there is: no other rank has to be asked."""

    divisor = 1
    left_out = False
    lockstep = False

    def __init__(self, whole: LossModule) -> None:
        self._whole = whole
        self._parameters: Sequence[torch.nn.Parameter] = ()

    def use(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """See Placement. What is frozen now must not move by its last gradient."""
        self.zero_gradients()
        self._parameters = parameters

    def pieces(self, own: list[Piece]) -> list[Piece]:
        """See Placement."""
        return own

    def zero_gradients(self) -> None:
        """See Placement."""
        for parameter in self._parameters:
            parameter.grad = None

    def loss_of(self, piece: Any, *, last: bool) -> Any:  # noqa: ARG002 - nothing follows from it here
        """See Placement."""
        return self._whole(piece)

    def evaluate(self, loss: Any, piece: Any) -> Any:
        """See Placement."""
        return self._whole(piece, loss)

    def finish(self, loss: torch.Tensor) -> None:
        """See Placement."""

    def forget_left_out(self) -> None:
        """See Placement. They got none."""

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """See Placement."""
        return torch.nn.utils.get_total_norm(gradients)
