"""Exact resume, and that nothing saved is saved in vain: leaving any item out makes the resumed run differ."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fulltilt.train import checkpoint, checkpoint_format, random_states, train_state
from fulltilt.train.random_states import restore_rng, rng_state
from fulltilt.train.sampler import EpochPlan
from fulltilt.train.train_state import StepEnd
from tests.faults import victim
from tests.faults.ranks import exit_codes
from tests.faults.victim import Order


class Tight:
    """A loss that runs out of memory above a batch of 4 in training and 5 in evaluation, while memory is tight."""

    def __init__(self, tight: bool) -> None:
        self.tight = tight

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        if self.tight and len(batch[0]) > (4 if model.training else 5):
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return victim.loss(model, batch)


SETTINGS: dict[str, Any] = {"precision": "fp16", "save_every": 3, "accumulation": 2, "batch_size": 6, "epochs": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return run(tmp_path_factory.mktemp("whole") / "out")


def run(out: Path, stop_at: int | None = None) -> dict[int, str]:
    # Memory is tight only until the first kill: afterwards nothing but the checkpoint knows of it.
    tight = not (out / "checkpoints").exists()
    return victim.run_here(out, stop_at=stop_at, changes={"loss": Tight(tight)}, **SETTINGS)


def test_a_resumed_run_repeats_the_whole_one_bit_for_bit(whole: dict[int, str], tmp_path: Path) -> None:
    """Every part is in play: fp16 with its scale, EMA, dropout, batch norm, an OOM, evaluation, best-k."""
    assert len(whole) == 12
    first = run(tmp_path / "out", stop_at=7)
    second = run(tmp_path / "out", stop_at=11)
    third = run(tmp_path / "out")
    assert min(second) == 7
    assert min(third) == 10
    for part in (first, second, third):
        assert part == {step: whole[step] for step in part}


PARTS = (
    *("progress", "optimizer", "loss_scale", "random", "totals", "guard", "micro_batch", "eval_micro_batch"),
    *("history", "ema"),
)


@pytest.mark.parametrize("forgotten", PARTS)
@pytest.mark.slow
def test_forgetting_a_part_shows(
    forgotten: str, whole: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "out", stop_at=8)
    take_over, forgot = train_state.take_over, []

    def forgetful(folder: Path, name: str, part: train_state.Stateful, state: Any) -> None:
        if name == forgotten:
            forgot.append(name)
        else:
            take_over(folder, name, part, state)

    monkeypatch.setattr(train_state, "take_over", forgetful)
    assert differs(lambda: run(tmp_path / "out"), whole)
    assert forgot


def test_the_list_above_is_complete(tmp_path: Path) -> None:
    """``settings`` is the one part that changes nothing but what the user is told (see test_loop)."""
    run(tmp_path / "out", stop_at=5)
    found = checkpoint.newest_complete(tmp_path / "out" / "checkpoints").checkpoint
    assert found is not None
    seen = checkpoint.load(found.folder)[1]
    assert set(seen) == {*PARTS, "settings"}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("optimizer", ["x"]),
        ("random", None),
        ("progress", {"step": 3}),
        ("progress", {"step": 3, "epoch": None, "consumed": 18}),
        ("progress", {"step": 3, "epoch": -1, "consumed": 0.5}),
    ],
)
def test_parts_of_another_kind_are_refused_before_the_first_step(part: str, value: Any, tmp_path: Path) -> None:
    """With checksums that fit: as whoever wants to be believed would write them."""
    run(tmp_path / "out", stop_at=5)
    found = checkpoint.newest_complete(tmp_path / "out" / "checkpoints").checkpoint
    assert found is not None
    weights, state = checkpoint.load(found.folder)
    values, tensors = checkpoint_format.flatten_state({**state, part: value})
    snapshot = checkpoint.Snapshot(found.step, found.epoch, found.metric, weights, tensors, values)
    checkpoint.write(found.folder.parent, snapshot)
    with pytest.raises(checkpoint.DamagedCheckpoint, match=f"its {part} cannot be taken over"):
        run(tmp_path / "out")


@pytest.mark.parametrize("forgotten", ["python", "numpy", "torch"])
@pytest.mark.slow
def test_forgetting_a_random_state_shows(
    forgotten: str, whole: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "out", stop_at=8)
    restore = restore_rng

    def forgetful(states: dict[str, Any], device: torch.device) -> None:
        fresh = rng_state(device)
        restore({**states, forgotten: fresh[forgotten]}, device)

    monkeypatch.setattr(random_states, "restore_rng", forgetful)
    assert differs(lambda: run(tmp_path / "out"), whole)


@pytest.mark.parametrize("forgotten", ["step", "epoch", "consumed"])
@pytest.mark.slow
def test_forgetting_where_the_run_was_shows(
    forgotten: str, whole: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "out", stop_at=8)
    load = train_state.Progress.load_state_dict
    monkeypatch.setattr(
        train_state.Progress, "load_state_dict", lambda self, saved: load(self, {**saved, forgotten: 0})
    )
    assert differs(lambda: run(tmp_path / "out"), whole)


@pytest.mark.parametrize("forgotten", ["weights", "buffers"])
@pytest.mark.slow
def test_forgetting_the_model_shows(
    forgotten: str, whole: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "out", stop_at=8)
    load = victim.Net.load_state_dict

    def forgetful(self: victim.Net, saved: dict[str, torch.Tensor], **rest: Any) -> Any:
        own = dict(self.named_parameters() if forgotten == "weights" else self.named_buffers())
        return load(self, {**saved, **{name: tensor.detach().clone() for name, tensor in own.items()}}, **rest)

    monkeypatch.setattr(victim.Net, "load_state_dict", forgetful)
    assert differs(lambda: run(tmp_path / "out"), whole)


def test_forgetting_the_permutation_shows(
    whole: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not saved but made again from seed and epoch: another one must not pass for it."""
    run(tmp_path / "out", stop_at=8)
    order = EpochPlan.order
    monkeypatch.setattr(EpochPlan, "order", lambda plan: order(dataclasses.replace(plan, seed=plan.seed + 1)))
    assert differs(lambda: run(tmp_path / "out"), whole)


def test_forgetting_which_checkpoint_was_best_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best epoch was the first; its checkpoint outlives a resume only if its metric was kept with it."""
    values = iter((0.1, 0.5, 0.6, 0.5, 0.6))

    def eval_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.tensor(next(values))

    def kept(out: Path, epochs: int) -> list[str]:
        changes = {"eval_loss": eval_loss, "eval_data": victim.NoisySamples(4)}
        victim.run_here(out, changes=changes, epochs=epochs, keep_last=1, keep_best=1, save_every=None)
        return sorted(path.name for path in (out / "checkpoints").iterdir())

    assert kept(tmp_path / "out", 1) == ["step-00000006"]
    assert kept(tmp_path / "out", 3) == ["step-00000006", "step-00000018"]
    monkeypatch.setattr(checkpoint, "_described", _without_metric(checkpoint._described))
    assert "step-00000006" not in kept(tmp_path / "out", 5)


def _without_metric(described: Any) -> Any:
    return lambda *given: dataclasses.replace(described(*given), metric=None)


def take_the_first_ranks_random_state(order: Order) -> None:
    if order.note == "forget":
        load = random_states.RandomStates.load_state_dict
        random_states.RandomStates.load_state_dict = lambda self, saved: load(self, {"ranks": saved["ranks"][:1] * 2})  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("note", ["keep", "forget"])
def test_forgetting_the_random_state_of_a_rank_shows(note: str, tmp_path: Path) -> None:
    assert exit_codes(tmp_path / "whole", 2) == [0, 0]
    assert exit_codes(tmp_path / "cut", 2, on_step=stop_at_5) == [3, 3]
    assert exit_codes(tmp_path / "cut", 2, prepare=take_the_first_ranks_random_state, note=note) == [0, 0]
    whole, cut = victim.chain(tmp_path / "whole"), victim.chain(tmp_path / "cut")
    assert (whole == cut) == (note == "keep")


def stop_at_5(end: StepEnd) -> None:
    if end.step == 5 and end.state.group.info.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)


def differs(resumed: Any, whole: dict[int, str]) -> bool:
    hashes: dict[int, str] = resumed()
    return any(whole.get(step) != found for step, found in hashes.items()) or max(hashes, default=0) != max(whole)


@pytest.mark.parametrize("residency", ["none", "auto"])
@pytest.mark.parametrize(("workers", "accumulation"), list(itertools.product((0, 2), (1, 3))))
@pytest.mark.slow
def test_workers_do_not_change_what_is_trained(workers: int, accumulation: int, residency: str, tmp_path: Path) -> None:
    settings = {"accumulation": accumulation, "batch_size": 4, "residency": residency}
    plain = victim.run_here(tmp_path / "plain", **settings)
    victim.run_here(tmp_path / "cut", **settings, workers=workers, stop_at=4)
    resumed = victim.run_here(tmp_path / "cut", **settings, workers=workers)
    assert min(resumed) == 4
    assert resumed == {step: plain[step] for step in resumed}
