"""A mixture of experts over a feature map: every expert works, and each picture decides how much each one counts."""

from __future__ import annotations

import torch
from torch import nn


class Experts(nn.Module):
    """``count`` small convolutional experts, added to their input in the shares that a router gives each picture.

    Routing is soft, so that every expert gets a gradient from every picture. All experts are one grouped computation.
    """

    def __init__(self, width: int, count: int, hidden: int) -> None:
        super().__init__()
        self.count = count
        self.router = nn.Linear(width, count)
        self.enter = nn.Conv2d(width, count * hidden, 1)
        self.look = nn.Conv2d(count * hidden, count * hidden, 3, padding=1, groups=count * hidden)
        self.leave = nn.Conv2d(count * hidden, width, 1)
        self.activation = nn.GELU()
        # The mixture begins as the identity: a decoder that works already is not disturbed by fresh experts.
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)  # type: ignore[arg-type]

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The features with the experts' part added, and how unevenly the experts are used (0 when evenly)."""
        # Shares in float32: with the digits of bf16 they would no longer add up to one.
        shares = torch.softmax(self.router(features.mean(dim=(2, 3))).float(), dim=1)
        hidden = self.activation(self.look(self.enter(features)))
        weight = shares.to(hidden.dtype).repeat_interleave(hidden.shape[1] // self.count, dim=1)
        mixed = self.leave(hidden * weight[:, :, None, None])
        return features + mixed, imbalance(shares)


def imbalance(shares: torch.Tensor) -> torch.Tensor:
    """Of routing shares [pictures, experts]: 0 when all experts get the same, experts - 1 when one gets all."""
    used = shares.mean(dim=0)
    return shares.shape[1] * (used * used).sum() - 1.0
