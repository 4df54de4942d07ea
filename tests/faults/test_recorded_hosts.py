"""Two hosts record one job into a shared folder without locks: one is lost, then the job is started again."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt import store
from fulltilt.diagnosis import answer
from tests.faults.test_hosts import PROJECT, namespaces


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not namespaces(), reason="this machine gives no network namespaces")
def test_two_hosts_write_one_job_and_nothing_is_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "job"
    command = ["unshare", "-Urnu", sys.executable, "-m", "tests.faults.two_recorded_hosts", str(out)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=1000, check=False)
    logs = "".join(path.read_text()[-3000:] for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    run = store.load(out)
    assert [(rank.rank, rank.finished) for rank in run.ranks] == [(rank, True) for rank in range(4)]
    assert run.run.state == "done"
    assert run.warnings == ()
    diagnosis = answer(run)
    assert diagnosis.job is not None
    assert (set(diagnosis.job.hosts), diagnosis.job.attempts) == ({"host1", "host2"}, 2)
    assert 0 < diagnosis.job.goodput < 1
    assert diagnosis.throughput.steps == 100
    # The attempt in which a host was lost is all there, its missing host is told, and nothing of it was touched.
    (lost,) = run.earlier
    assert sorted(rank.rank for rank in lost.ranks) == [0, 1, 2, 3]
    assert any("host2 is missing" in line for line in lost.warnings)
    stood_still, listing = done.stdout.splitlines()
    assert "rank 2 on host2 has written nothing for" in stood_still or "rank 0 on host2" in stood_still
    before = ast.literal_eval(listing)
    assert set(before) <= {str(file.relative_to(out)) for file in out.glob("*/*")}
    assert len(list(out.glob("host*"))) == 4
