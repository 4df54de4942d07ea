"""The forecast, on histories whose end is known."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.diagnosis.metric_forecast import forecast


def approach(limit: float, share: float, epochs: int, noise: float = 0.0) -> list[tuple[float, float]]:
    chance = random.Random(0)
    return [(e, limit * (1 - share**e) + chance.gauss(0, noise)) for e in range(1, epochs + 1)]


def test_a_straight_line_is_followed() -> None:
    found = forecast([(e, 0.70 + 0.01 * e) for e in range(8)], 0.85, epoch_s=600)
    assert found.state == "ahead"
    assert found.epochs == pytest.approx((8.0, 8.0), abs=0.01)
    assert found.hours == pytest.approx((8 * 600 / 3600, 8 * 600 / 3600), abs=0.01)
    assert found.rate_per_epoch == pytest.approx(0.01)


def test_the_true_epoch_lies_in_the_range() -> None:
    history = approach(0.9, 0.8, 10)
    true = next(e for e in range(1, 100) if 0.9 * (1 - 0.8**e) >= 0.87)
    found = forecast(history, 0.87)
    assert found.state == "ahead"
    assert found.epochs is not None
    assert found.epochs[0] <= true - 10 <= found.epochs[1] + 1


def test_saturation_is_said() -> None:
    found = forecast(approach(0.80, 0.6, 10), 0.9)
    assert found.state == "saturates"
    assert found.limit == pytest.approx(0.80, abs=0.02)
    assert found.epochs is None
    assert "will not be reached" in found.sentence


def test_noise_without_progress_is_flat() -> None:
    chance = random.Random(1)
    found = forecast([(e, 0.5 + chance.gauss(0, 0.01)) for e in range(12)], 0.9)
    assert found.state == "flat"


def test_a_loss_goes_down() -> None:
    found = forecast([(e, 1.0 - 0.05 * e) for e in range(6)], 0.5, mode="min")
    assert found.state == "ahead"
    assert found.rate_per_epoch == pytest.approx(-0.05)
    assert found.epochs == pytest.approx((5.0, 5.0), abs=0.01)


def test_reached_and_unknown() -> None:
    assert forecast([(1, 0.5), (2, 0.95), (3, 0.9)], 0.9).state == "reached"
    assert forecast([(1, 0.5)], 0.9).sentence == "2 more epochs are needed for a forecast"
    assert forecast([(1, 0.5), (2, 0.6)], 0.9).sentence == "1 more epoch is needed for a forecast"
    assert forecast([], 0.9).state == "unknown"


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), max_size=20),
    st.floats(-1e6, 1e6),
    st.sampled_from(["max", "min"]),
)
def test_any_history_gives_an_answer(values: list[float], target: float, mode: str) -> None:
    found = forecast(list(enumerate(values)), target, 60.0, mode)  # type: ignore[arg-type]
    assert found.sentence
    parts_of_epochs = [(number * 1e-4, value) for number, value in enumerate(values)]
    assert forecast(parts_of_epochs, target, 60.0, mode).sentence  # type: ignore[arg-type]
    if found.epochs is not None:
        assert 0 <= found.epochs[0] <= found.epochs[1]


def test_the_forecast_is_the_same_in_finer_epochs() -> None:
    """As in a log with a line every few steps of a long epoch."""
    history = approach(0.9, 0.8, 10)
    coarse, fine = forecast(history, 0.87), forecast([(epoch * 1e-4, value) for epoch, value in history], 0.87)
    assert coarse.epochs is not None
    assert fine.epochs == pytest.approx([end * 1e-4 for end in coarse.epochs])


def test_of_several_values_in_an_epoch_the_last_one_counts() -> None:
    once = [(e, 0.70 + 0.01 * e) for e in range(8)]
    often = [(e, value + off) for e, value in once for off in (-0.2, -0.1, 0.0)]
    assert forecast(often, 0.85, epoch_s=600) == forecast(once, 0.85, epoch_s=600)


@pytest.mark.parametrize(
    ("target", "epoch_s", "told"),
    [
        (0.785, 600.0, "the target 0.785 in 1 epoch, 5 min"),
        (0.85, 600.0, "the target 0.85 in 7 epochs, 1 h 10 min"),
        (0.85, None, "the target 0.85 in 7 epochs"),
    ],
)
def test_the_sentence_counts_as_people_do(target: float, epoch_s: float | None, told: str) -> None:
    assert forecast([(e, 0.70 + 0.01 * e) for e in range(9)], target, epoch_s=epoch_s).sentence.endswith(told)
