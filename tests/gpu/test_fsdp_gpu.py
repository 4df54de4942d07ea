"""FSDP2 on one GPU: a torchrun job with a single rank over NCCL, recorded, saved in shards and resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt import store
from fulltilt.diagnosis import answer
from tests.recorder.test_sharded_ranks import recorded

pytestmark = pytest.mark.gpu
PROJECT = Path(__file__).parents[2]


def test_the_ledger_of_a_sharded_job_closes(tmp_path: Path) -> None:
    """Alone, a rank of FSDP2 may leave its collectives out; those that it calls are on the ledger, or the job is not
    called compute-bound."""
    (counted,) = recorded(tmp_path / "run", 1, "cuda", "256", "2048", "300").values()
    run = store.load(tmp_path / "run")
    found = answer(run)
    assert run.ranks[0].sharded
    assert found.throughput.steps == 300
    ledger = found.ledger
    assert ledger.buckets.total_s == pytest.approx(ledger.wall_s, rel=1e-6)
    assert ledger.buckets.unattributed_s < 0.03 * ledger.wall_s
    if counted["all_gather"] + counted["reduce_scatter"]:
        on_ledger = ledger.buckets.communication_s > 0 or run.ranks[0].communication is not None
        assert on_ledger or found.verdict.code != "compute_bound"
    else:
        assert found.verdict.code != "communication_bound"


def test_shards_are_saved_over_nccl_and_resumed_with_and_without_fsdp(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    job = ["-m", "tests.gpu.one_rank", str(tmp_path), "cuda", "shards"]
    done = subprocess.run([*torchrun, *job], cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "resumed with and without FSDP" in done.stdout, done.stdout
