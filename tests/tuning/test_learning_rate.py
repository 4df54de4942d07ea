"""The learning rate for another batch size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.tuning import learning_rate


@pytest.mark.parametrize(
    ("rate", "batch", "new", "optimizer", "deep", "arithmetic"),
    [
        (0.0004, 8, 16, "AdamW", False, "0.0004 × sqrt(16/8) = 0.000566"),
        (0.0004, 8, 12, "Adam", False, "0.0004 × sqrt(12/8) = 0.00049"),
        (0.1, 256, 1024, "SGD", False, "0.1 × 1024/256 = 0.4"),
        (0.00024, 8, 12, "AdamW", True, "0.00024 × sqrt(12/8) × 0.56/0.6 (deep supervision) = 0.000274"),
        (0.00024, 8, 16, "AdamW", True, "0.00024 × sqrt(16/8) × 0.50/0.6 (deep supervision) = 0.000283"),
        (2e-5, 96, 96, "AdamW", False, "2e-05, as it is"),
    ],
)
def test_the_arithmetic_is_printed(
    rate: float, batch: int, new: int, optimizer: str, deep: bool, arithmetic: str
) -> None:
    assert learning_rate.scale(rate, batch, new, optimizer, deep).arithmetic == arithmetic


def test_deep_supervision_lowers_the_rate() -> None:
    factors = [learning_rate.deep_supervision_factor(ratio) for ratio in (1.0, 1.25, 1.5, 2.0, 8.0)]
    assert factors == pytest.approx([0.6, 0.58, 0.56, 0.5, 0.5])


def test_warm_up_is_advised_for_a_rate_that_is_much_higher() -> None:
    assert learning_rate.scale(0.0004, 8, 12).warm_up is None
    advice = learning_rate.scale(0.0004, 8, 32).warm_up
    assert advice is not None
    assert "2 × as high" in advice


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_accumulation_keeps_the_effective_batch(batch: int, fits: int) -> None:
    answer = learning_rate.accumulation_for(batch, fits)
    assert answer is not None
    parts, size = answer
    assert parts * size == batch
    assert size <= fits


def test_deep_supervision_is_seen_in_the_command() -> None:
    assert learning_rate.uses_deep_supervision(("train_ultimate.py", "train", "--deep-supervision"))
    assert not learning_rate.uses_deep_supervision(("train.py", "--supervision"))
