"""The metrics against their definitions and torchmetrics."""

from __future__ import annotations

import pytest
import torch

from fulltilt.recipes.hdf5 import trainer as metrics


def scored(seed: int, count: int = 500, *, ties: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, generator=generator) < 0.2).long()
    logits = torch.randn(count, generator=generator) + 1.5 * labels
    return (logits * 2).round() / 2 if ties else logits, labels


def called_at(logits: torch.Tensor, threshold: float) -> torch.Tensor:
    return torch.sigmoid(logits.double()) > threshold - 1e-12  # a vector's last digit may be another


@pytest.mark.parametrize("ties", [False, True])
def test_areas_and_f1_by_their_definitions(ties: bool) -> None:
    logits, labels = scored(1, 200, ties=ties)
    found = metrics.summary(logits, labels)
    above, below = logits[labels == 1][:, None], logits[labels == 0][None, :]
    assert found["auroc"] == pytest.approx(float(((above > below) + 0.5 * (above == below)).float().mean()))
    rates = []
    for cut in sorted(set(logits.tolist()), reverse=True):
        called = logits >= cut
        hits = float((called & (labels == 1)).sum())
        rates.append((hits / float(called.sum()), hits / float(labels.sum())))
    gains = [now - before for (_, now), before in zip(rates, [0.0, *(recall for _, recall in rates)], strict=False)]
    area = sum(precision * gain for (precision, _), gain in zip(rates, gains, strict=True))
    assert found["auprc"] == pytest.approx(area)
    f1 = found["f1"]
    assert f1 == pytest.approx(max(2 * p * r / (p + r) for p, r in rates if p + r))
    called = called_at(logits, found["threshold"])
    assert f1 == pytest.approx(2 * float((called & (labels == 1)).sum()) / float(called.sum() + labels.sum()))


@pytest.mark.slow
@pytest.mark.recipes
@pytest.mark.parametrize("ties", [False, True])
def test_areas_and_f1_are_those_of_torchmetrics(ties: bool) -> None:
    from torchmetrics.functional import classification as reference

    logits, labels = scored(1, ties=ties)
    found = metrics.summary(logits, labels)
    assert found["auroc"] == pytest.approx(float(reference.binary_auroc(logits, labels)), abs=1e-6)
    assert found["auprc"] == pytest.approx(float(reference.binary_average_precision(logits, labels)), abs=1e-6)
    f1 = found["f1"]
    called = called_at(logits, found["threshold"]).long()
    assert f1 == pytest.approx(float(reference.binary_f1_score(called, labels)), abs=1e-6)
    every = [float(reference.binary_f1_score((logits >= other).long(), labels)) for other in logits[:50]]
    assert f1 >= max(every) - 1e-6


def test_a_set_of_one_class_has_no_metrics_rather_than_wrong_ones() -> None:
    assert metrics.summary(torch.randn(5), torch.zeros(5)) == {}
    assert metrics.summary(torch.empty(0), torch.empty(0)) == {}
    assert metrics.summary(torch.tensor([0.1, torch.nan]), torch.tensor([0, 1])) == {}
