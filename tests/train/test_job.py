"""Warm-up, cosine to a floor, stages, progressive unfreezing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.train.build import learning_rate_of
from fulltilt.train.config import TrainSettings
from fulltilt.train.job import Stage, stage_at, trainable
from fulltilt.train.optimizers import learning_rate
from fulltilt.train.train_state import Progress


def test_the_shape() -> None:
    rates = [learning_rate(s, total_steps=100, peak=1.0, floor=0.1, warmup_steps=10) for s in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 50), st.floats(0, 0.5))
def test_the_rate_stays_between_floor_and_peak(step: int, total: int, warmup: int, floor: float) -> None:
    rate = learning_rate(step, total_steps=total, peak=1.0, floor=floor, warmup_steps=warmup)
    assert 0.0 < rate <= 1.0 or floor == 0.0
    assert rate >= floor - 1e-12 or step < warmup


def test_a_constant_rate() -> None:
    assert learning_rate(50, total_steps=100, peak=0.3, shape="constant") == 0.3


STAGES = (
    Stage("warm", 30, lr=4e-4),
    Stage("fine", 90, lr=2.4e-4, frozen=("backbone.*",), unfreeze=((5, "backbone.stages.3.*"), (10, "backbone.*"))),
)


def test_stages_follow_each_other() -> None:
    assert [stage_at(STAGES, epoch) for epoch in (0, 29, 30, 119, 500)] == [(0, 0), (0, 29), (1, 0), (1, 89), (1, 470)]


def test_unfreezing_goes_step_by_step() -> None:
    names = ["backbone.stem.weight", "backbone.stages.3.weight", "head.weight"]
    assert trainable(names, STAGES[0], 0) == set(names)
    assert trainable(names, STAGES[1], 4) == {"head.weight"}
    assert trainable(names, STAGES[1], 5) == {"head.weight", "backbone.stages.3.weight"}
    assert trainable(names, STAGES[1], 10) == set(names)


def test_a_stage_has_its_own_rate_and_the_runs_floor() -> None:
    settings = TrainSettings(lr=1.0, min_lr=1e-5, warmup_epochs=3)
    source = SimpleNamespace(steps_per_epoch=lambda: 10, steps_done=lambda consumed: consumed)

    def rate(epoch: int, step: int) -> float:
        progress = Progress(epoch=epoch, consumed=step)
        state: Any = SimpleNamespace(settings=settings, stages=STAGES, progress=progress, source=source)
        return learning_rate_of(state)

    assert rate(32, 9) == pytest.approx(2.4e-4)
    assert rate(119, 9) == pytest.approx(1e-5)
