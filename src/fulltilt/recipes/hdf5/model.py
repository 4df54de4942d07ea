"""A compact network for windows of features, its loss, and how well its scores tell two classes apart."""

from __future__ import annotations

import math
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

    @property
    def positives(self) -> float:
        """How many samples are positive."""
        return float(self.true_positives[-1])

    @property
    def negatives(self) -> float:
        """How many samples are negative."""
        return float(self.false_positives[-1])


def curve(logits: torch.Tensor, labels: torch.Tensor) -> Curve | None:
    """The curve of a set; None when it lacks one of the classes, where no such metric means anything."""
    order = torch.sort(logits.double(), descending=True, stable=True)
    truth = labels.double()[order.indices]
    found, missed = truth.cumsum(0), (1 - truth).cumsum(0)
    if not len(truth) or not float(found[-1]) or not float(missed[-1]):
        return None
    # Samples of one score are taken or left together: only the last of them is a threshold.
    last = torch.ones_like(truth, dtype=torch.bool)
    last[:-1] = order.values.diff() != 0
    return Curve(order.values[last], found[last], missed[last])


def auroc(of: Curve) -> float:
    """The chance that a positive sample scores above a negative one; ties count half."""
    hit = torch.cat([of.true_positives.new_zeros(1), of.true_positives]) / of.positives
    false_alarm = torch.cat([of.false_positives.new_zeros(1), of.false_positives]) / of.negatives
    return float(torch.trapezoid(hit, false_alarm))


def auprc(of: Curve) -> float:
    """Average precision: the precision at each threshold, weighted by the recall that it adds."""
    precision = of.true_positives / (of.true_positives + of.false_positives)
    gained = torch.cat([of.true_positives[:1], of.true_positives.diff()]) / of.positives
    return float((precision * gained).sum())


def best_f1(of: Curve) -> tuple[float, float]:
    """The highest F1, and the logit at and above which a sample has to be called positive for it."""
    f1 = 2 * of.true_positives / (of.positives + of.true_positives + of.false_positives)
    best = int(f1.argmax())
    return float(f1[best]), float(of.thresholds[best])


def calibration_error(probabilities: torch.Tensor, labels: torch.Tensor, bins: int = 15) -> float:
    """ECE: how far, on average, the predicted probability of a positive is from their share, over equal bins."""
    probabilities, labels = probabilities.double(), labels.double()
    which = (probabilities * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64, device=which.device).index_add_(0, which, probabilities - labels)
    return float(gap.abs().sum()) / max(len(labels), 1)


def best_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The T that makes sigmoid(logit / T) the most likely probabilities of the labels, within 0.01 to 100.

    The likelihood is concave in 1 / T, so that halving the interval finds it; nothing to tune, the same on every
    machine.
    """
    logits, labels = logits.double(), labels.double()
    low, high = 0.01, 100.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        slope = float(((torch.sigmoid(middle * logits) - labels) * logits).sum())
        low, high = (low, middle) if slope > 0 else (middle, high)
    return 1 / math.sqrt(low * high)


@dataclass(frozen=True, slots=True)
class Calibration:
    """From a logit to a decision: ``sigmoid(logit / temperature)`` is a probability, ``threshold`` the best cut."""

    temperature: float
    threshold: float


def summary(logits: torch.Tensor, labels: torch.Tensor) -> tuple[dict[str, float], Calibration | None]:
    """All metrics of a set by name, and its calibration. A set that lacks one class has neither.

    The temperature is fitted on every other sample and its error is that of the rest: a fit does not judge itself.
    """
    found = curve(logits, labels)
    if found is None:
        return {}, None
    f1, cut = best_f1(found)
    temperature = best_temperature(logits[::2], labels[::2])
    rest, truth = logits[1::2], labels[1::2]
    calibration = Calibration(temperature, float(torch.sigmoid(torch.tensor(cut / temperature))))
    metrics = {
        "auroc": auroc(found),
        "auprc": auprc(found),
        "f1": f1,
        "threshold": calibration.threshold,
        "ece": calibration_error(torch.sigmoid(rest.double()), truth),
        "ece_calibrated": calibration_error(torch.sigmoid(rest.double() / temperature), truth),
        "temperature": temperature,
    }
    return metrics, calibration
