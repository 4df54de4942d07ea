"""Losses that are not finite, a loss scale that collapses, a loss that jumps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fulltilt.train.checkpoint import newest_complete
from fulltilt.train.config import TrainSettings
from fulltilt.train.guards import Guard, StepFigures
from tests.faults import victim
from tests.faults.ranks import exit_codes
from tests.faults.victim import Order


class Poisoned(victim.NoisySamples):
    """Samples whose inputs are spoilt for the given indices."""

    def __init__(self, spoilt: set[int], factor: float) -> None:
        super().__init__()
        self.spoilt, self.factor = spoilt, factor

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, label = super().__getitem__(index)
        return (inputs * self.factor if index in self.spoilt else inputs), label


def test_a_bad_step_is_skipped_counted_and_named(tmp_path: Path) -> None:
    """Seen to fail: with ``bad`` always False in `Stepper._update` the weights become NaN."""
    changes = {"data": Poisoned({22}, math.nan)}
    torch.manual_seed(7)
    net = changes["model"] = victim.Net()  # type: ignore[assignment]
    victim.run_here(tmp_path / "out", changes=changes, epochs=1)
    assert all(torch.isfinite(p).all() for p in net.parameters())  # type: ignore[attr-defined]
    told = (tmp_path / "out.txt").read_text()
    assert "warning: step 2 was skipped: loss nan, gradient norm nan; samples 19, 33, 38, 15, 22, 20, 4, 29" in told
    assert told.count("was skipped") == 1
    assert "train_loss nan" not in told


def poison(order: Order) -> dict[str, Any]:
    return {"data": Poisoned(set(range(44)) if order.note == "all" else {22}, math.nan)}


def test_several_in_a_row_roll_back_once_and_then_exit_6(tmp_path: Path) -> None:
    """Seen to fail: without `_give_up` the run ends with code 0, having trained on nothing."""
    assert victim.exit_code(Order(tmp_path, {"epochs": 1, "save_every": 2})) == 0
    settings = {"epochs": 9, "bad_steps_in_a_row": 3}
    assert victim.exit_code(Order(tmp_path, settings, prepare=poison, note="all")) == 6
    told = victim.told(tmp_path)
    assert "rolled back to the weights of step-00000006; going on with the data that follows" in told
    assert "3 such steps in a row; 1 rollbacks done" in told
    assert max(victim.chain(tmp_path)) == 11, "the twelfth step was the sixth bad one"
    found = newest_complete(tmp_path / "checkpoints").checkpoint
    assert found is not None
    assert "the same command resumes there" in told
    assert "Traceback" not in told


def test_without_a_checkpoint_there_is_nowhere_to_go_back_to(tmp_path: Path) -> None:
    settings = {"save_every": None, "bad_steps_in_a_row": 3}
    assert victim.exit_code(Order(tmp_path, settings, prepare=poison, note="all")) == 6
    assert "there is no checkpoint to go back to" in victim.told(tmp_path)


class InfiniteValue:
    """A loss that is infinite at every third call, with gradients as if it were not."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        value, _ = victim.loss(model, batch)
        return value + (math.inf if self.calls % 3 == 0 else 0.0)


def infinite_on_rank_1(order: Order) -> dict[str, Any]:
    return {"loss": InfiniteValue() if order.rank == 1 else victim.loss, "eval_data": None}


def test_ranks_skip_together(tmp_path: Path) -> None:
    """Seen to fail: with `loss` not summed over the ranks in `GradientExchange.finish` rank 0 steps and rank 1 does
    not, which the look for drift after each step finds."""
    settings = {"epochs": 1, "drift_every": 1, "monitor": None, "monitor_mode": "max"}
    assert exit_codes(tmp_path, 2, settings=settings, prepare=infinite_on_rank_1) == [0, 0], victim.told(tmp_path)
    assert victim.told(tmp_path).count("was skipped: loss inf") == 2


class Overflowing:
    """A loss whose gradient is never finite in fp16, whatever the scale."""

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        value, _ = victim.loss(model, batch)
        return _InfiniteGradient.apply(value)


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.inf


def overflow(order: Order) -> dict[str, Any]:
    return {"loss": Overflowing(), "eval_data": None}


def test_the_loss_scale_stops_at_its_floor(tmp_path: Path) -> None:
    """Seen to fail: without the comparison with the floor in `Guard.judge` the run skips every step and exits 0."""
    settings = {"precision": "fp16", "epochs": 20, "monitor": None, "monitor_mode": "max"}
    assert victim.exit_code(Order(tmp_path, settings, prepare=overflow)) == 6
    assert "the loss scale fell to" in victim.told(tmp_path)
    assert max(victim.chain(tmp_path)) < 40


def test_a_spike_is_reported_and_on_request_rolled_back(tmp_path: Path) -> None:
    """Seen to fail: with `_is_spike` returning False nothing is said."""
    settings: dict[str, Any] = {"epochs": 6, "clip_norm": None, "save_every": 4, "lr": 1e-4}

    class OneBigStep:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
            value, metrics = victim.loss(model, batch)
            self.calls += model.training
            return (value * 1e4 if self.calls == 30 and model.training else value), metrics

    victim.run_here(tmp_path / "report", changes={"loss": OneBigStep()}, **settings)
    told = (tmp_path / "report.txt").read_text()
    assert "warning: step 30: the loss jumped to" in told
    assert "rolled back" not in told
    victim.run_here(tmp_path / "rollback", changes={"loss": OneBigStep()}, **settings, on_spike="rollback")
    assert "rolled back to the weights of step-00000028" in (tmp_path / "rollback.txt").read_text()


def judged(guard: Guard, losses: list[float], **figures: Any) -> list[str]:
    return [
        guard.judge(StepFigures(i, loss, 1.0, bad=not math.isfinite(loss), **figures)).action
        for i, loss in enumerate(losses)
    ]


def test_a_single_bad_step_between_good_ones_never_adds_up() -> None:
    guard = Guard(TrainSettings(bad_steps_in_a_row=3))
    assert set(judged(guard, [1.0, math.nan, math.nan] * 50)) == {"go"}
    assert guard.skipped == 100


def test_ordinary_noise_and_negative_losses_are_no_spikes() -> None:
    for level in (1.0, -3.0, 0.0):
        guard = Guard(TrainSettings(on_spike="rollback"))
        noise = torch.randn(300, generator=torch.Generator().manual_seed(0)).tolist()
        assert set(judged(guard, [level + 0.1 * n for n in noise])) == {"go"}


def test_a_new_level_of_losses_is_told_until_it_is_the_usual_one() -> None:
    guard = Guard(TrainSettings())
    noise = torch.rand(2100, generator=torch.Generator().manual_seed(0)).tolist()
    losses = [(0.5 if number < 100 else 1.2) + 0.01 * n for number, n in enumerate(noise)]
    told = [guard.judge(StepFigures(i, loss, 1.0, bad=False)).why for i, loss in enumerate(losses)]
    assert told[100]
    assert not any(told[160:])


@pytest.mark.parametrize("kind", ["non-finite", "spike"])
def test_rollbacks_are_counted_out(kind: str) -> None:
    guard = Guard(TrainSettings(bad_steps_in_a_row=1, rollbacks=2, on_spike="rollback"))
    bad = math.inf if kind == "non-finite" else 1e9
    actions = judged(guard, [1.0] * 30 + [bad, 1.0, bad, bad])
    assert actions[30:] == ["rollback", "go", "rollback", "stop"]


def test_fp16_looking_for_its_scale_is_not_a_bad_step() -> None:
    guard = Guard(TrainSettings(bad_steps_in_a_row=2))
    verdicts = [guard.judge(StepFigures(i, 0.5, math.inf, bad=True, loss_scale=2.0 ** (16 - i))) for i in range(8)]
    assert {verdict.action for verdict in verdicts} == {"go"}
    assert guard.in_a_row == 0
