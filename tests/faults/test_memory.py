"""Memory runs out in a step, on one rank of two, and with a single sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fulltilt.errors import DoesNotFit
from fulltilt.train.checkpoint import newest_complete
from tests.faults import victim
from tests.faults.ranks import exit_codes
from tests.faults.victim import Order


class SmallMemory:
    """A loss without randomness that runs out of memory above ``most`` samples, in forward or in backward."""

    def __init__(self, most: int, where: str = "forward") -> None:
        self.most, self.where, self.failures = most, where, 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        outputs = model.last(torch.relu(model.first(inputs))).squeeze(1)
        if len(inputs) > self.most:
            self.failures += 1
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
            model.first.weight.register_hook(self._fail_once())
        return torch.nn.functional.binary_cross_entropy_with_logits(outputs, labels.float())

    def _fail_once(self) -> Any:
        failed = []

        def hook(_gradient: torch.Tensor) -> None:
            if not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("CUDA out of memory (pretended, in backward)")

        return hook


def train(out: Path, loss: Any) -> tuple[torch.nn.Module, str]:
    torch.manual_seed(7)
    net = victim.Net()
    changes = {"loss": loss, "model": net, "eval_data": None}
    victim.run_here(out, changes=changes, monitor=None, monitor_mode="max")
    return net, (out.parent / f"{out.name}.txt").read_text()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_micro_batch_is_halved_and_the_effective_batch_kept(where: str, tmp_path: Path) -> None:
    """Seen to fail: with `is_out_of_memory` returning False the error ends the run; without the factor
    ``running / samples`` on the loss the weights differ from those of the roomy run."""
    roomy, _ = train(tmp_path / "roomy", SmallMemory(1000))
    small = SmallMemory(3, where)
    tight, told = train(tmp_path / "tight", small)
    assert "step 1: memory ran out; going on with micro-batches of 4 (the effective batch stays 8)" in told
    assert "step 1: memory ran out; going on with micro-batches of 2 (the effective batch stays 8)" in told
    assert small.failures == 2, "halved twice, then remembered"
    for a, b in zip(roomy.parameters(), tight.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_loss_that_compares_samples_is_not_split(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="compares the samples"):
        victim.run_here(tmp_path / "out", changes={"loss": SmallMemory(3), "splittable": False, "eval_data": None})


def always_full(order: Order) -> dict[str, Any]:
    return {"loss": SmallMemory(0)}


def test_out_of_memory_with_a_single_sample(tmp_path: Path) -> None:
    """Seen to fail: without the check in `MicroBatch.halve` the loop never ends."""
    assert victim.exit_code(Order(tmp_path, prepare=always_full)) == 5
    told = victim.told(tmp_path)
    assert "memory ran out in step 1 with a single sample" in told
    assert "gradient_checkpointing" in told
    assert "Traceback" not in told


def full_on_rank_1(order: Order) -> dict[str, Any]:
    most = 1000 if order.rank == 0 else 2
    return {"loss": SmallMemory(most, order.note), "eval_data": None}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.slow
def test_one_rank_of_two_runs_out(where: str, tmp_path: Path) -> None:
    """Seen to fail: without `Placement.finish` after a failed attempt the ranks' sums no longer match and both crash;
    without the agreement in `Stepper.step` both hang."""
    settings = {"monitor": None, "monitor_mode": "max"}
    assert exit_codes(tmp_path, 2, settings=settings, prepare=full_on_rank_1, note=where) == [0, 0]
    first, second = victim.chain(tmp_path, 0), victim.chain(tmp_path, 1)
    assert len(first) == 12
    assert first == second, "both ranks hold the same weights after every step"
    assert "memory ran out; going on with micro-batches of 2" in victim.told(tmp_path)
    found = newest_complete(tmp_path / "checkpoints").checkpoint
    assert found is not None
