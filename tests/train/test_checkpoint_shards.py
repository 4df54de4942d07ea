"""Shards that torch.distributed.checkpoint writes: as safe as any checkpoint, and no code comes out of them."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fulltilt.errors import MachineError
from fulltilt.train import checkpoint
from fulltilt.train.checkpoint import DamagedCheckpoint, HostMemory, KeepPolicy, Snapshot, Writer, newest_complete
from fulltilt.train.checkpoint_format import SHARDS_FILE
from tests.faults.test_fuzz import seal
from tests.train.test_checkpoint import claimed, snapshot


def one_rank() -> DeviceMesh:
    """This process as the only rank of a job."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return DeviceMesh.from_group(dist.group.WORLD, "cpu")


def in_shards(whole: Snapshot, mesh: DeviceMesh) -> Snapshot:
    """The same snapshot with weights and one moment in shards."""
    weight = DTensor.from_local(whole.model["w"], mesh, [Shard(0)], run_check=False)
    tensors = {**whole.tensors, "state/moment": weight * 2}
    values = {**whole.values, "moment": {"$tensor": "state/moment"}}
    return replace(whole, model={**whole.model, "w": weight}, tensors=tensors, values=values)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    yield one_rank()
    dist.destroy_process_group()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return claimed(tmp_path / "out")


def save(root: Path, step: int, mesh: DeviceMesh) -> Path:
    written = checkpoint.write_shards(root, in_shards(snapshot(step), mesh), mesh.get_group())
    assert written is not None
    return written.folder


def test_shards_come_back_whole_and_bit_for_bit_without_ranks(root: Path, mesh: DeviceMesh) -> None:
    folder = save(root, 12, mesh)
    assert not (folder / checkpoint.MODEL_FILE).exists()
    taken = snapshot(12)
    model, state = checkpoint.load(folder)
    assert model.keys() == taken.model.keys()
    assert all(torch.equal(model[name], taken.model[name]) for name in model)
    assert state["progress"] == {"step": 12}
    assert torch.equal(state["moment"], taken.model["w"] * 2)
    assert torch.equal(state["rng"], torch.arange(5, dtype=torch.uint8))


def test_a_sharded_model_gets_its_own_part_only(root: Path, mesh: DeviceMesh) -> None:
    folder = save(root, 12, mesh)
    model, state = checkpoint.load(folder, in_shards(snapshot(1), mesh).model)
    assert isinstance(model["w"], DTensor)
    assert isinstance(state["moment"], DTensor)
    assert not isinstance(model["b"], DTensor)
    assert not isinstance(state["rng"], DTensor)
    assert torch.equal(model["w"].full_tensor(), snapshot(12).model["w"])


def test_a_damaged_shard_is_refused_and_the_one_before_taken(root: Path, mesh: DeviceMesh) -> None:
    for step in (1, 2):
        save(root, step, mesh)
    for file in sorted((root / "step-00000002").iterdir()):
        good = file.read_bytes()
        file.write_bytes(good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :])
        found = newest_complete(root)
        assert found.checkpoint is not None
        assert found.checkpoint.step == 1, file
        assert "step-00000002 is refused" in found.warnings[0]
        file.write_bytes(good)
    assert not newest_complete(root).warnings


@pytest.mark.parametrize("tries", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_damage_with_matching_sums_is_read_or_refused(tries: int, root: Path, mesh: DeviceMesh) -> None:
    folder, chance = save(root, 1, mesh), random.Random(0)
    files = [(file, file.read_bytes()) for file in (folder / SHARDS_FILE, folder / "__0_0.distcp")]
    refused = 0
    for number in range(tries):
        file, good = files[number % 2]
        place, size = chance.randrange(len(good)), chance.choice((0, 1, 2, 40))
        file.write_bytes(good[:place] + chance.randbytes(size) + good[place + chance.choice((size, 0, 3)) :])
        seal(folder)
        try:
            checkpoint.load(folder)
        except DamagedCheckpoint:
            refused += 1
        file.write_bytes(good)
    seal(folder)
    checkpoint.load(folder)
    assert refused > tries / 3


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-checkpoint",)


@pytest.mark.parametrize("dotted", [False, True])
def test_no_code_of_a_checkpoint_from_elsewhere_is_run(
    root: Path, mesh: DeviceMesh, dotted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums are right: whoever made it made them, too. Seen to fail: with pickle's own Unpickler the folder is made;
    with one that takes any name of torch's module of descriptions, `os.mkdir` is reached through it."""
    folder = save(root, 1, mesh)
    raw = pickle.dumps(Harmful(), protocol=4)
    if dotted:
        module, name = b"torch.distributed.checkpoint.metadata", b"os.mkdir"
        spelled = b"".join(b"\x8c" + bytes([len(text)]) + text for text in (module, name))
        raw = b"\x80\x04" + spelled + b"\x93\x8c\x14made-by-a-checkpoint\x85R."
    (folder / SHARDS_FILE).write_bytes(raw)
    seal(folder)
    monkeypatch.chdir(root)
    with pytest.raises(DamagedCheckpoint, match="is no part of a checkpoint"):
        checkpoint.load(folder)
    assert not (root / "made-by-a-checkpoint").exists()


def test_the_background_writer_freezes_shards_and_keeps_by_policy(root: Path, mesh: DeviceMesh) -> None:
    memory, writer = HostMemory(), Writer(root, KeepPolicy(last=2, best=0), mesh)
    weight = DTensor.from_local(torch.zeros(1000), mesh, [Shard(0)], run_check=False)
    for step in range(1, 5):
        writer.wait()
        weight.fill_(step)
        frozen = memory.freeze({"w": weight}, "model", mesh)
        weight.fill_(-1)  # what the next step does to it must not reach the disk
        writer.save(Snapshot(step, 0, None, frozen, {}, {}))
    writer.wait()
    assert [path.name for path in checkpoint.folders(root)] == ["step-00000004", "step-00000003"]
    assert checkpoint.load(root / "step-00000004")[0]["w"].unique().tolist() == [4]


def test_a_full_disk_is_told_and_leaves_nothing(root: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root, 1, mesh)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(MachineError, match="No space left on device"):
            save(root, 2, mesh)
    assert [path.name for path in root.iterdir()] == ["step-00000001"]
