"""Weights divided among the ranks: the same training, exact resume, and checkpoints that fit any number of ranks."""

from __future__ import annotations

import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fulltilt.train import checkpoint, distributed
from fulltilt.train.checkpoint import newest_complete
from fulltilt.train.distributed import blocks
from fulltilt.train.weight_import import read_weights
from tests.faults import ranks, victim
from tests.faults.ranks import exit_codes
from tests.faults.test_numbers import Poisoned
from tests.faults.test_ranks import ids, stop_rank_0, weights
from tests.faults.victim import Order

# 43 of 44 samples, then one: in every second step a rank has nothing of its own to compute.
UNEVEN: dict[str, Any] = {"batch_size": 43, "epochs": 3, "save_every": 1, "fsdp": True}


class Blocks(torch.nn.Module):
    """Two blocks and something beside them; nothing in it depends on how a batch is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.ReLU(), torch.nn.Linear(7, 6)) for _ in range(2)
        )
        self.last = torch.nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return self.last(inputs).squeeze(1)


def even_handed(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    inputs, labels = batch
    outputs = model(inputs)
    value = torch.nn.functional.binary_cross_entropy_with_logits(outputs, labels.float())
    return value, {"accuracy": ((outputs > 0) == labels).float().mean()}


def small_blocks(order: Order) -> dict[str, Any]:
    distributed.LEAST_BLOCK_PARAMETERS = 1
    torch.manual_seed(7)
    return {"model": Blocks(), "loss": even_handed}


@pytest.mark.slow
def test_resume_is_exact(tmp_path: Path) -> None:
    """With dropout, batch norm, EMA, clipping, evaluation and moments. Seen to fail: with `OptimizerState` loading
    what it is given, the optimizer refuses whole moments beside sharded weights; with an `Ema` that swaps the tensors
    instead of their values, evaluation sees the plain weights and the best checkpoint is another."""
    settings = {"fsdp": True, "batch_size": 12}
    assert exit_codes(tmp_path / "whole", 2, settings=settings) == [0, 0], victim.told(tmp_path / "whole")
    assert exit_codes(tmp_path / "cut", 2, settings=settings, on_step=stop_rank_0) == [3, 3]
    assert exit_codes(tmp_path / "cut", 2, settings=settings) == [0, 0]
    assert victim.chain(tmp_path / "cut") == victim.chain(tmp_path / "whole")


@pytest.mark.slow
def test_from_one_process_to_shards_on_two_and_three_ranks(tmp_path: Path) -> None:
    """Weights and metrics are those of a run that stayed in one process. Seen to fail: without `Sharded.pieces` a rank
    without samples leaves the other waiting for ever."""
    moves = {"stayed": [(6, 1, False)], "moved": [(1, 1, False), (4, 2, True), (6, 3, True)]}
    for name, starts in moves.items():
        for steps, world, fsdp in starts:
            settings = {**UNEVEN, "fsdp": fsdp, "max_steps": steps, "schedule": "constant"}
            codes = exit_codes(tmp_path / name, world, settings=settings, prepare=small_blocks)
            assert codes == [0] * world, victim.told(tmp_path / name)
    assert ids(tmp_path / "moved") == ids(tmp_path / "stayed")
    stayed = weights(tmp_path / "stayed")
    for name, tensor in weights(tmp_path / "moved").items():
        torch.testing.assert_close(tensor, stayed[name], rtol=1e-3, atol=1e-5, msg=name)
    first, second = (last_metrics(tmp_path / name) for name in moves)
    assert first == pytest.approx(second, rel=1e-3, abs=1e-5)


class ExactSums(torch.nn.Module):
    """Its gradients are small whole numbers, whatever its weights: their sum is exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, size) for size in (7, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = torch.cat([block(inputs) for block in self.blocks], 1)
        return (outputs * torch.arange(1, 9)).sum(1)


class WholeNumbers(victim.NoisySamples):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.inputs[index] * 2).round(), self.inputs[index].sum() > 0


def signed_mean(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return (model(inputs) * torch.where(labels, 1.0, -1.0)).mean()


def exact_sums(order: Order) -> dict[str, Any]:
    distributed.LEAST_BLOCK_PARAMETERS = 1
    torch.manual_seed(7)
    return {"model": ExactSums(), "loss": signed_mean, "data": WholeNumbers(48), "eval_data": None}


@pytest.mark.slow
@pytest.mark.parametrize(("prepare", "rounded"), [(exact_sums, False), (small_blocks, True)])
def test_what_two_ranks_saved_in_shards_one_two_and_four_resume(prepare: Any, rounded: bool, tmp_path: Path) -> None:
    """AdamW and an average of the weights; the data is the same in the same order on any number of ranks. So are the
    weights, bit for bit, where sums of gradients are exact. Where they are rounded, two ranks give the same bits and
    other numbers of ranks, which sum in another order, the same up to rounding.

    Seen to fail: with the moments left out of `write_shards`, or read as zeros, the exact weights differ."""
    settings: dict[str, Any] = {"fsdp": True, "batch_size": 16, "epochs": 4, "save_every": 2, "clip_norm": None}
    settings |= {"monitor": None, "monitor_mode": "max", "schedule": "constant"}
    asked = {"settings": settings, "prepare": prepare}
    assert exit_codes(tmp_path / "whole", 2, **asked) == [0, 0], victim.told(tmp_path / "whole")
    assert exit_codes(tmp_path / "cut", 2, **asked, on_step=stop_rank_0) == [3, 3]
    saved = checkpoint.folders(tmp_path / "cut" / "checkpoints")[0]
    files = {file.name for file in saved.iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= files
    assert checkpoint.MODEL_FILE not in files
    found = read_weights(saved)  # as a second stage asks for them
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in checkpoint.load(saved)[0].items()
    }
    assert len(victim.chain(tmp_path / "cut")) <= 6 < len(victim.chain(tmp_path / "whole"))
    expected = weights(tmp_path / "whole")
    for world in (1, 2, 4):
        out = tmp_path / str(world)
        shutil.copytree(tmp_path / "cut", out)
        assert exit_codes(out, world, **asked) == [0] * world, victim.told(out)
        assert ids(out) == ids(tmp_path / "whole")
        near = 1e-4 if rounded and world != 2 else 0
        for name, tensor in weights(out).items():
            torch.testing.assert_close(tensor, expected[name], rtol=near, atol=near / 10, msg=f"{world} {name}")
    assert victim.chain(tmp_path / "2") == victim.chain(tmp_path / "whole")


def kill_rank_1(order: Order) -> None:
    if order.rank == 1:
        victim.kill_at_disk_call(2)  # its shards of the second checkpoint are written, and not yet flushed


@pytest.mark.slow
def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    settings = {"fsdp": True, "save_every": 2}
    assert exit_codes(tmp_path / "whole", 2, settings=settings) == [0, 0], victim.told(tmp_path / "whole")
    codes = ranks.run_as_torchrun(ranks.start(tmp_path / "cut", 2, settings=settings, prepare=kill_rank_1))
    assert codes[1] == -signal.SIGKILL
    found = newest_complete(tmp_path / "cut" / "checkpoints")
    assert not found.warnings
    assert found.checkpoint is not None
    assert found.checkpoint.step == 2
    assert exit_codes(tmp_path / "cut", 2, settings=settings) == [0, 0], victim.told(tmp_path / "cut")
    for rank in (0, 1):
        assert victim.chain(tmp_path / "cut", rank) == victim.chain(tmp_path / "whole", rank)


def poisoned(order: Order) -> dict[str, Any]:
    return {**small_blocks(order), "data": Poisoned(set(range(44)), math.nan)}


@pytest.mark.slow
def test_shards_go_back_to_the_checkpoint_when_the_loss_is_nan(tmp_path: Path) -> None:
    settings = {"fsdp": True, "epochs": 1, "save_every": 2}
    assert exit_codes(tmp_path, 2, settings=settings, prepare=small_blocks) == [0, 0], victim.told(tmp_path)
    settings |= {"epochs": 9, "save_every": 200, "bad_steps_in_a_row": 3}
    assert exit_codes(tmp_path, 2, settings=settings, prepare=poisoned) == [6, 6]
    assert "rolled back to the weights of step-00000006" in victim.told(tmp_path)


@pytest.mark.slow
def test_a_single_rank_is_told_that_it_divides_nothing(tmp_path: Path) -> None:
    settings = {"fsdp": True, "max_steps": 1}
    assert victim.exit_code(Order(tmp_path, settings)) == 0
    assert "there is only one rank, so the model is not sharded" in victim.told(tmp_path)
    assert (checkpoint.folders(tmp_path / "checkpoints")[0] / checkpoint.MODEL_FILE).exists()


def last_metrics(out: Path) -> dict[str, float]:
    names, *_, values = (line.split(",") for line in (out / "metrics.csv").read_text().splitlines())
    return {name: float(value) for name, value in zip(names, values, strict=True) if name.startswith(("train", "eval"))}


def full_on_rank_1(order: Order) -> dict[str, Any]:
    def loss(model: torch.nn.Module, batch: Any) -> Any:
        if order.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return even_handed(model, batch)

    return {**small_blocks(order), "loss": loss}


@pytest.mark.slow
def test_out_of_memory_ends_the_run_with_a_word(tmp_path: Path) -> None:
    codes = ranks.run_as_torchrun(ranks.start(tmp_path, 2, settings=UNEVEN, prepare=full_on_rank_1))
    assert codes[1] == 5
    told = victim.told(tmp_path, 1)
    assert "memory ran out with" in told
    assert "raise accumulation" in told


def test_blocks_are_found_where_networks_keep_them() -> None:
    layer = torch.nn.TransformerEncoderLayer(128, 4)
    encoder = torch.nn.TransformerEncoder(layer, 3)
    assert blocks(encoder) == list(encoder.layers)
    wide = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    assert blocks(wide) == [wide[0], wide[2]]
    assert blocks(torch.nn.Linear(512, 512)) == []
