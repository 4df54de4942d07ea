"""Places, parts and lines of several ranks; the hash that finds drift."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.errors import UsageError
from fulltilt.train import distributed
from fulltilt.train.data_source import samples_in_batch, split_batch
from fulltilt.train.distributed import (
    RankInfo,
    bit_hash,
    divided,
    part_of,
    rank_from_env,
    relaunch,
)


def test_the_place_among_the_ranks_is_torchruns() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    srun = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}
    assert rank_from_env(torchrun) == rank_from_env({**torchrun, **srun}) == RankInfo(3, 8, 1)
    assert rank_from_env({}) == RankInfo()
    assert rank_from_env({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) == RankInfo(), "a batch script is no srun step"
    with pytest.raises(UsageError, match="srun started 8"):
        rank_from_env(srun)
    with pytest.raises(UsageError):
        rank_from_env({"RANK": "x", "WORLD_SIZE": "2"})


@given(st.integers(0, 500), st.integers(1, 16))
def test_parts_add_up(total: int, world: int) -> None:
    parts = [part_of(total, RankInfo(rank, world)) for rank in range(world)]
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1


def test_the_guides_lines() -> None:
    assert divided(32, 8, RankInfo(0, 2)) == "batch 32 = 2 ranks × 16; workers 8 = 4 a rank"
    assert divided(9, 1, RankInfo(0, 2)) == "batch 9 = 2 ranks × 4 or 5; workers 1 = 0 or 1 a rank"
    with pytest.raises(UsageError, match="cannot be divided among 4 ranks"):
        divided(3, 0, RankInfo(0, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8])
def test_one_flipped_bit_changes_the_hash(dtype: torch.dtype) -> None:
    tensor = torch.arange(100).to(dtype)
    before = bit_hash([tensor, tensor])
    assert bit_hash([tensor.clone(), tensor]) == before
    assert 0 <= before < 2**52
    assert float(before) == before
    flipped = tensor.clone()
    flipped.view(torch.uint8)[37] ^= 4
    assert bit_hash([flipped, tensor]) != before
    assert bit_hash([tensor.flip(0), tensor]) != before


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(10),
        (torch.arange(10), torch.arange(20).view(10, 2)),
        {"x": torch.arange(10), "names": [f"n{i}" for i in range(10)], "scale": 3.0},
        [torch.arange(10), {"y": torch.zeros(10, 1)}],
    ],
    ids=["tensor", "tuple", "dict", "nested"],
)
def test_batches_are_split_whatever_their_structure(batch: object) -> None:
    assert samples_in_batch(batch) == 10
    parts = list(split_batch(batch, 10, 4))
    assert [count for _, count in parts] == [4, 4, 2]
    assert [samples_in_batch(part) for part, _ in parts] == [4, 4, 2]
    assert type(parts[0][0]) is type(batch)


def test_what_belongs_to_the_whole_batch_stays_whole() -> None:
    batch = {"x": torch.arange(6), "names": list("abcdef"), "weight": torch.tensor(2.0), "table": torch.zeros(3, 2)}
    second = list(split_batch(batch, 6, 4))[1][0]
    assert second["x"].tolist() == [4, 5]
    assert second["names"] == ["e", "f"]
    assert second["weight"] == 2.0
    assert second["table"].shape == (3, 2)


def test_samples_that_differ_in_shape_are_split() -> None:
    batch = (tuple(torch.zeros(3, 5 + n) for n in range(4)), tuple({"boxes": torch.zeros(n, 4)} for n in range(4)))
    second = list(split_batch(batch, 4, 3))[1][0]
    assert [image.shape[1] for image in second[0]] == [8]
    assert [len(target["boxes"]) for target in second[1]] == [3]


def test_a_batch_without_samples_is_told() -> None:
    with pytest.raises(UsageError, match="how many samples"):
        samples_in_batch(object())


# --------------------------------------------------------------------------- one command, several ranks


def rank_that(does: str) -> list[str]:
    """A rank without torch: it starts at once."""
    return [sys.executable, "-c", f"import os, signal, sys, time; rank = int(os.environ['RANK']); {does}"]


@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("assert os.environ['WORLD_SIZE'] == '2' and 'OMP_NUM_THREADS' in os.environ", 0),
        ("sys.exit(5 if rank else 0)", 5),
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)", 128 + signal.SIGKILL),
    ],
    ids=["done", "one rank", "both", "killed"],
)
def test_the_code_of_the_ranks_comes_out_as_it_is(does: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    assert relaunch(2, "cpu", rank_that(does)) == code
    assert capfd.readouterr().err == ""
    assert dict(os.environ) == before


def test_a_signal_reaches_every_rank_and_the_ranks_decide(tmp_path: Path) -> None:
    ready = "open(sys.argv[1] + f'/{rank}', 'w').close()"
    waits = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); {ready}; time.sleep(60)"

    def terminate() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=terminate)
    sender.start()
    began = time.monotonic()
    handler = signal.getsignal(signal.SIGTERM)
    assert relaunch(2, "cpu", [*rank_that(waits), str(tmp_path)]) == 3
    sender.join()
    assert time.monotonic() - began < 30
    assert signal.getsignal(signal.SIGTERM) == handler


def test_nothing_is_started_where_the_ranks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_run_ranks", lambda *_: pytest.fail("started"))
    assert relaunch(1) is None
    for launcher in (
        {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
        {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"},
    ):
        with monkeypatch.context() as patched:
            for name, value in launcher.items():
                patched.setenv(name, value)
            assert relaunch(2) is None


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        relaunch(0)
    with pytest.raises(UsageError, match="torch sees"):
        relaunch(2, "cuda")
