"""A job with FSDP2 under `fulltilt run`: what its ranks wait for each other's parameters is communication."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fulltilt import store
from fulltilt.diagnosis import answer

JOB = Path(__file__).with_name("sharded_job.py")


def recorded(out: Path, world: int, *job: str) -> dict[int, dict[str, Any]]:
    """Record the job as ``world`` ranks into ``out``; returns what each of them counted itself."""
    torchrun = ["--", sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [sys.executable, "-m", "fulltilt", "run", "--out", str(out), *torchrun, str(JOB), *job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line.partition("TRUTH ")[2]) for line in done.stdout.splitlines() if "TRUTH " in line]
    assert len(told) == world, done.stdout
    return {one["rank"]: one for one in told}


@pytest.mark.slow
@pytest.mark.quiet
def test_gathers_and_scatters_of_two_ranks_are_on_the_ledger(tmp_path: Path) -> None:
    """Large layers and few samples: most of a step is communication. The job times it by itself."""
    truth = recorded(tmp_path / "run", 2, "cpu", "4", "1024", "60")
    run = store.load(tmp_path / "run")
    found = answer(run)
    assert found.verdict.code == "communication_bound", found.verdict
    assert len(found.ranks) == 2
    for rank in found.ranks:
        counted = truth[rank.rank]
        assert counted["all_gather"] >= 3 * 60  # two layers in forward, and again in backward but for the last
        assert counted["reduce_scatter"] == 2 * 60
        assert run.ranks[rank.rank].sharded
        seconds = counted["seconds"]
        # The first steps may count as start-up, and the stopwatches of the job take a little themselves.
        assert 0.9 * (seconds[-1] - seconds[2]) < rank.buckets.communication_s < 1.1 * seconds[-1], rank
