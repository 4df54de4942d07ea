"""Replicas under DDP: parameters that some or all ranks leave out, and buckets that do not move the last bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fulltilt.train.distributed import bit_hash
from fulltilt.train.job import Stage
from fulltilt.train.train_state import StepEnd
from tests.faults import victim
from tests.faults.ranks import exit_codes
from tests.faults.test_ranks import Plain, weights
from tests.faults.victim import Order

SETTINGS: dict[str, Any] = {"epochs": 1, "save_every": 50, "weight_decay": 0.5, "monitor": None, "monitor_mode": "max"}


class Branches(victim.Net):
    """``seldom`` is used by the samples of one sort only, ``never`` by none."""

    def __init__(self) -> None:
        super().__init__()
        self.seldom = torch.nn.Linear(6, 1)
        self.never = torch.nn.Linear(6, 1)


def branching(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    outputs = model.last(torch.relu(model.first(inputs))).squeeze(1)
    chosen = inputs[:, 0] > 0.8
    if chosen.any():
        outputs = outputs.masked_scatter(chosen, model.seldom(inputs[chosen]).squeeze(1))
    return torch.nn.functional.binary_cross_entropy_with_logits(outputs, labels.float())


def branches(order: Order) -> dict[str, Any]:
    torch.manual_seed(7)
    return {"model": Branches(), "loss": branching, "eval_data": None}


@pytest.mark.slow
def test_parameters_that_a_rank_leaves_out(tmp_path: Path) -> None:
    """Seen to fail: without the backward of nothing both ranks wait for ever; without `forget_left_out` weight decay
    shrinks ``never`` on two ranks and leaves it alone on one."""
    assert victim.exit_code(Order(tmp_path / "one", SETTINGS, prepare=branches)) == 0
    assert exit_codes(tmp_path / "two", 2, settings=SETTINGS, prepare=branches) == [0, 0]
    alone, together = weights(tmp_path / "one"), weights(tmp_path / "two")
    fresh = branches(Order(tmp_path))["model"].state_dict()
    assert torch.equal(together["never.weight"], fresh["never.weight"])
    assert not torch.equal(together["seldom.weight"], fresh["seldom.weight"])
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-3, atol=1e-4, msg=name)


def thawing(order: Order) -> dict[str, Any]:
    stages = (Stage("all", 1), Stage("head", 2, frozen=("first.*",), unfreeze=((1, "first.*"),)))
    return {"loss": Plain(), "stages": stages, "eval_data": None}


def note_the_first_layer(end: StepEnd) -> None:
    bits = bit_hash([victim.whole(end.state.model.first.weight.detach())])
    with (end.state.out / f"first.{end.state.group.info.rank}.txt").open("a") as file:
        file.write(f"{end.epoch} {bits}\n")


@pytest.mark.parametrize(("world", "fsdp"), [(1, False), (2, False), (2, True)])
@pytest.mark.slow
def test_what_is_frozen_stays_and_what_is_thawed_moves(world: int, fsdp: bool, tmp_path: Path) -> None:
    """Seen to fail: in one process, without `zero_gradients` in `use`, the frozen layer moves by its last gradient."""
    settings = {**SETTINGS, "fsdp": fsdp, "schedule": "constant"}
    codes = exit_codes(tmp_path, world, settings=settings, prepare=thawing, on_step=note_the_first_layer)
    assert codes == [0] * world, victim.told(tmp_path)
    lines = [line.split() for line in (tmp_path / "first.0.txt").read_text().splitlines()]
    seen = {epoch: [bits for at, bits in lines if at == epoch] for epoch in ("0", "1", "2")}
    assert len(set(seen["0"])) == len(set(seen["2"])) == 6
    assert set(seen["1"]) == {seen["0"][-1]}


def stop_at_4(end: StepEnd) -> None:
    if end.step == 4:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_three_ranks_resume_bit_for_bit(tmp_path: Path) -> None:
    """Seen to fail: without the two backwards of nothing in `Replicated.use` the first step after the resume sums in
    other buckets than the run that went on, and its last bits differ."""
    settings = {"batch_size": 12}  # batch norm wants two samples on each rank, in the last step too
    assert exit_codes(tmp_path / "whole", 3, settings=settings) == [0, 0, 0]
    assert exit_codes(tmp_path / "cut", 3, settings=settings, on_step=stop_at_4) == [3, 3, 3]
    assert exit_codes(tmp_path / "cut", 3, settings=settings) == [0, 0, 0]
    assert victim.chain(tmp_path / "cut") == victim.chain(tmp_path / "whole")
