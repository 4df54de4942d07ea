"""A job of 512 ranks and 100,000 steps, as its ranks would have written it, is reported in a minute and 2 GiB."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt import store
from fulltilt.recorder.intervals import ONE_BY_ONE, IntervalBuilder
from fulltilt.records import Buckets, Phases, RankRecord, RunRecord, Span, Task
from tests.diagnosis.examples import machine

RANKS, A_NODE, STEPS, STEP_S, SLOW = 512, 8, 100_000, 0.3, 77


def span_ends() -> list[int]:
    """After which steps a rank of such a job ends its spans."""
    resolution = IntervalBuilder(0, RANKS)._resolution
    ends = list(range(1, ONE_BY_ONE + 1))
    while ends[-1] < STEPS:
        ends.append(min(ends[-1] + max(int(ends[-1] / resolution), 1), STEPS))
    return ends


def spans(slow_s: float) -> list[Span]:
    made, before = [Span(0, 10, 0, 0, 0, None, Buckets(startup_s=10.0))], 0
    for end in span_ends():
        n = end - before
        part = {"compute_s": 0.2 + slow_s, "data_wait_s": 0.02, "host_code_s": 0.01, "communication_s": 0.07 - slow_s}
        buckets = Buckets(**{name: n * each for name, each in part.items()})
        phases = Phases(*(n * each for each in (0.02, 0.001, 0.1, 0.1, 0.02, 0.01, 0.2, 0.1)))
        times = (10 + before * STEP_S, 10 + end * STEP_S)
        made.append(Span(*times, before, n, n, n * 8, buckets, phases=phases))
        before = end
    return made


def write_job(out: Path) -> None:
    wall_s = 10 + STEPS * STEP_S
    for node in range(RANKS // A_NODE):
        folder = store.create_task_folder(out, f"{node:02d}-h{node}")
        task = Task("j", node, RANKS // A_NODE)
        run = RunRecord(
            "train", (), "2026-01-01T10:00:00+00:00", machine(hostname=f"h{node}"), "1", "done", wall_s, 0, task=task
        )
        store.write_json(folder / store.RUN_FILE, run)
        for rank in range(node * A_NODE, (node + 1) * A_NODE):
            record = RankRecord(
                rank,
                RANKS,
                1,
                f"h{node}",
                "cuda:0",
                f"GPU-{rank}",
                0,
                wall_s,
                True,
                STEPS,
                STEPS,
                group="g",
            )
            store.write_json(folder / store.rank_file(rank), record)
            writer = store.LineWriter(folder / store.steps_file(rank))
            writer.write(spans(0.05 if rank == SLOW else 0.0))
            writer.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_512_ranks_are_reported_in_a_minute_and_2_gib(tmp_path: Path) -> None:
    out = tmp_path / "job"
    write_job(out)
    assert sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) < 2 * 2**30
    report = subprocess.Popen([sys.executable, "-m", "fulltilt", "report", str(out)], stdout=subprocess.PIPE, text=True)
    assert report.stdout is not None
    told = report.stdout.read()
    _, status, used = os.wait4(report.pid, 0)
    assert status == 0
    assert "Straggler: the others wait for rank 77 on h9 17 %" in " ".join(told.split())
    assert used.ru_utime + used.ru_stime < 60  # it has one thread; others may use the machine as well
    assert used.ru_maxrss < 2 * 2**20
