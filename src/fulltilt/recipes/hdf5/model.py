"""A compact network for windows of features, and its loss."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional


class WindowNet(nn.Module):
    """Windows [batch, time, features] to one logit each: convolutions of ``width`` channels, then attention."""

    def __init__(self, features: int, width: int = 64, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        # Recordings differ in gain and offset by orders of magnitude.
        self.normalise = nn.BatchNorm1d(features, affine=False)
        self.look = nn.Sequential(
            _convolution(features, width, 7, stride=1),
            _convolution(width, width, 5, stride=2),
            _convolution(width, width, 3, stride=2),
        )
        self.before = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.pool = nn.Linear(width, 1)
        self.decide = nn.Sequential(nn.LayerNorm(width), nn.Dropout(dropout), nn.Linear(width, 1))

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """The logits, [batch]."""
        seen = self.look(self.normalise(windows.transpose(1, 2))).transpose(1, 2)
        seen = seen + self.attention(self.before(seen))
        weights = torch.softmax(self.pool(seen).float(), dim=1)
        pooled = (weights * seen).sum(dim=1)
        logits: torch.Tensor = self.decide(pooled)
        return logits.squeeze(-1).float()


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values.

    With torch.nn.MultiheadAttention a step of this network takes 4 % longer (H200, bf16, batch 8192).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] to the same."""
        batch, time, width = seen.shape
        split = self.project(seen).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


def _convolution(inside: int, outside: int, kernel: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv1d(inside, outside, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm1d(outside), nn.GELU())


Imbalance = Literal["pos_weight", "focal", "none"]


def binary_loss(
    logits: torch.Tensor, labels: torch.Tensor, imbalance: Imbalance, pos_weight: float, gamma: float
) -> torch.Tensor:
    """Binary cross-entropy with ``pos_weight``, or the focal loss with ``gamma``, or plain."""
    truth = labels.float()
    if imbalance == "pos_weight":
        weight = logits.new_full((), pos_weight)  # filled on the device, without a copy
        return functional.binary_cross_entropy_with_logits(logits, truth, pos_weight=weight)
    loss = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    if imbalance == "focal":
        loss = (1 - torch.exp(-loss)) ** gamma * loss
    return loss.mean()
