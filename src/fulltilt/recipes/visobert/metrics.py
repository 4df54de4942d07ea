"""Macro-F1 and accuracy from predicted and true classes."""

from __future__ import annotations

import torch


def classification(predicted: torch.Tensor, true: torch.Tensor, classes: int) -> dict[str, float]:
    """``macro_f1``, the mean F1 over the classes that occur, and ``accuracy``."""
    table = torch.bincount(true * classes + predicted, minlength=classes * classes).view(classes, classes).double()
    hits, asked, given = table.diagonal(), table.sum(1), table.sum(0)
    occurs = asked + given > 0
    f1 = 2 * hits[occurs] / (asked + given)[occurs]
    return {"macro_f1": float(f1.mean()), "accuracy": float(hits.sum() / table.sum())}
