"""A compact network for windows of features, its loss, and how well its scores tell two classes apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional


class WindowNet(nn.Module):
    """Windows [batch, time, features] to one logit each. ``width`` is the number of channels inside.

    Convolutions look at short stretches, attention at the whole window.
    """

    def __init__(self, features: int, width: int = 64, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        # Statistics of the data, not learnt: recordings differ in gain and offset by orders of magnitude.
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
    """Self-attention with one projection for queries, keys and values."""

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
    """The mean loss. ``focal`` turns to what is still wrong (exponent ``gamma``), ``pos_weight`` to the rare class."""
    truth = labels.float()
    if imbalance == "pos_weight":
        weight = logits.new_full((), pos_weight)  # filled on the device: a tensor from here would be copied over
        return functional.binary_cross_entropy_with_logits(logits, truth, pos_weight=weight)
    loss = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    if imbalance == "focal":
        loss = (1 - torch.exp(-loss)) ** gamma * loss
    return loss.mean()


# --------------------------------------------------------------------------- metrics


@dataclass(frozen=True)
class Curve:
    """True and false positives at every distinct threshold, from the highest down. Scores are logits."""

    thresholds: torch.Tensor
    true_positives: torch.Tensor
    false_positives: torch.Tensor


def curve(logits: torch.Tensor, labels: torch.Tensor) -> Curve | None:
    """The curve of a set; None when it lacks a class or a score is not finite: then no such metric means anything."""
    order = torch.sort(logits.double(), descending=True, stable=True)
    truth = labels.double()[order.indices]
    found, missed = truth.cumsum(0), (1 - truth).cumsum(0)
    if not len(truth) or not float(found[-1]) or not float(missed[-1]) or not bool(torch.isfinite(logits).all()):
        return None
    # Samples of one score are taken or left together: only the last of them is a threshold.
    last = torch.ones_like(truth, dtype=torch.bool)
    last[:-1] = order.values.diff() != 0
    return Curve(order.values[last], found[last], missed[last])


def auroc(of: Curve) -> float:
    """The chance that a positive sample scores above a negative one; ties count half."""
    hit = torch.cat([of.true_positives.new_zeros(1), of.true_positives]) / of.true_positives[-1]
    false_alarm = torch.cat([of.false_positives.new_zeros(1), of.false_positives]) / of.false_positives[-1]
    return float(torch.trapezoid(hit, false_alarm))


def auprc(of: Curve) -> float:
    """Average precision: the precision at each threshold, weighted by the recall that it adds."""
    precision = of.true_positives / (of.true_positives + of.false_positives)
    gained = torch.cat([of.true_positives[:1], of.true_positives.diff()]) / of.true_positives[-1]
    return float((precision * gained).sum())


def best_f1(of: Curve) -> tuple[float, float]:
    """The highest F1, and the logit at and above which a sample has to be called positive for it."""
    f1 = 2 * of.true_positives / (of.true_positives[-1] + of.true_positives + of.false_positives)
    best = int(f1.argmax())
    return float(f1[best]), float(of.thresholds[best])


def summary(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """All metrics of a set by name; ``threshold`` is the probability to cut at. A set that lacks one class has none."""
    found = curve(logits, labels)
    if found is None:
        return {}
    f1, cut = best_f1(found)
    threshold = float(torch.sigmoid(torch.tensor(cut)))
    return {"auroc": auroc(found), "auprc": auprc(found), "f1": f1, "threshold": threshold}
