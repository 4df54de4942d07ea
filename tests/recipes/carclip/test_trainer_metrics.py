"""Recall against a slow count by hand; a model that says nothing scores nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fulltilt.recipes.carclip import trainer as metrics
from fulltilt.recipes.carclip.trainer import recalls


def by_hand(images: torch.Tensor, texts: torch.Tensor, cars: list[int]) -> dict[str, float]:
    names = sorted(set(cars))
    gallery = {name: texts[cars.index(name)] for name in names}
    found = {}
    for rank in (1, 5, 10):
        hits = 0
        for image, car in zip(images, cars, strict=True):
            own = float(image @ gallery[car])
            hits += sum(float(image @ gallery[name]) > own for name in names if name != car) < rank
        found[f"i2t_recall_at_{rank}"] = hits / len(cars)
        hits = 0
        for name in names:
            scores = [(float(gallery[name] @ image), car == name) for image, car in zip(images, cars, strict=True)]
            best = max(score for score, own in scores if own)
            hits += sum(score > best for score, own in scores if not own) < rank
        found[f"t2i_recall_at_{rank}"] = hits / len(names)
    return found


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(3, 40), st.integers(1, 12))
def test_recall_is_what_a_count_by_hand_gives(seed: int, samples: int, cars: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    images, texts = (functional.normalize(torch.randn(samples, 6, generator=generator).double(), dim=1) for _ in "ab")
    drawn = torch.randint(cars, (samples,), generator=generator)
    found = recalls(images, texts, drawn)
    for name, value in by_hand(images, texts, drawn.tolist()).items():
        assert found[name] == pytest.approx(value), name


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    images, texts = functional.normalize(torch.randn(50, 6), dim=1), functional.normalize(torch.randn(50, 6), dim=1)
    cars = torch.arange(50) // 2
    whole = recalls(images, texts, cars)
    monkeypatch.setattr(metrics, "CHUNK", 7)
    assert recalls(images, texts, cars) == whole


def test_a_model_that_says_the_same_of_everything_finds_nothing() -> None:
    same = functional.normalize(torch.ones(30, 4), dim=1)
    found = recalls(same, same, torch.arange(30))
    assert found["recall_at_1"] == found["i2t_recall_at_10"] == found["t2i_recall_at_5"] == 0.0


def test_a_perfect_model_finds_everything() -> None:
    eye = torch.eye(12)
    assert set(recalls(eye, eye, torch.arange(12)).values()) == {1.0}
