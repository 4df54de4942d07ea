"""What several GPUs do, on one: a torchrun job with a single rank over NCCL. About 40 seconds on an H200."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
PROJECT = Path(__file__).parents[2]


def test_a_torchrun_job_of_one_rank_over_nccl(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    job = ["-m", "tests.gpu.one_rank", str(tmp_path), "cuda"]
    done = subprocess.run([*torchrun, *job], cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("agree with one process") == 3, done.stdout
