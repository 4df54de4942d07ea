"""A job that hangs and is killed: where it hung is on its ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt import store
from fulltilt.diagnosis.ledger import make_ledger
from fulltilt.recorder.intervals import IntervalBuilder
from fulltilt.recorder.marks import Activity, BackwardBegan, BackwardEnded, OptimizerStepped
from fulltilt.records import Buckets, Span
from tests.diagnosis.examples import rank, run_of

HANGS = """
import os, signal, threading, time
import torch
from torch.utils.data import DataLoader, TensorDataset

class Hangs(TensorDataset):
    def __getitem__(self, index):
        time.sleep(4 if index == 240 and {in_loader} else 0)
        return super().__getitem__(index)

torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
steps = 0
for (inputs,) in DataLoader(Hangs(torch.randn(400, 8)), batch_size=8):
    model(inputs).square().mean().backward()
    optimizer.step()
    steps += 1
    if steps == 30:
        threading.Timer(3.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        time.sleep(0 if {in_loader} else 4)
"""


@pytest.mark.parametrize(("in_loader", "bucket"), [(True, "data_wait_s"), (False, "host_code_s")])
@pytest.mark.slow
def test_a_job_that_hangs_and_is_killed_tells_where_it_hung(tmp_path: Path, in_loader: bool, bucket: str) -> None:
    (tmp_path / "train.py").write_text(HANGS.format(in_loader=in_loader))
    command = [sys.executable, "-m", "fulltilt", "run", "--out", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9
    answer = json.loads((tmp_path / "run" / "findings.json").read_text())
    buckets = answer["ledger"]["buckets"]
    assert buckets[bucket] == pytest.approx(2.9, abs=0.9)  # of 3.5 s all but the last second
    assert buckets["unattributed_s"] < 1.6
    assert sum(buckets.values()) == pytest.approx(answer["ledger"]["wall_s"])
    assert answer["findings"][0]["code"] == ("input_serial" if in_loader else "host_code")
    # Nobody is told to move work into a loader that is hanging.
    (loader,) = json.loads((tmp_path / "run" / "rank-0.json").read_text())["loaders"]
    assert loader["wait_s"] == pytest.approx(buckets["data_wait_s"], abs=0.1)


def builder_after_a_step() -> IntervalBuilder:
    builder = IntervalBuilder(0)
    for mark in (
        (1_000, Activity.BACKWARD, BackwardBegan()),
        (3_000, Activity.USER, BackwardEnded()),
        (4_000, Activity.OPTIMIZER, None),
        (5_000, Activity.USER, OptimizerStepped(1, False)),
    ):
        builder.feed((*mark, 0, None))
    return builder


def test_what_passed_since_the_last_step_is_told_without_changing_anything() -> None:
    builder = builder_after_a_step()
    builder.feed((7_000, Activity.DATA_WAIT, None, 0, None))
    first, again = builder.under_way(9_000), builder.under_way(12_000)
    assert first is not None
    assert again is not None
    assert (first.t0_ns, first.t1_ns, first.steps, first.times.by_label) == (
        5_000,
        9_000,
        0,
        {"user": 2_000, "data_wait": 2_000},
    )
    assert again.times.by_label == {"user": 2_000, "data_wait": 5_000}
    assert IntervalBuilder(0).under_way(9_000) is None


def test_nothing_is_told_in_a_pause() -> None:
    builder = builder_after_a_step()
    builder.feed((7_000, Activity.PAUSED, None, 0, None))
    assert builder.under_way(9_000) is None


@pytest.mark.parametrize(
    ("finished", "later_s", "told"), [(False, 0.0, True), (True, 0.0, False), (False, -0.5, False), (False, 0.2, True)]
)
def test_a_run_ends_with_what_was_under_way_unless_it_went_on(
    tmp_path: Path, finished: bool, later_s: float, told: bool
) -> None:
    run = run_of(rank(), compute=96.0, host_code=4.0)
    last = run.spans[0][-1]
    hung = Span(last.t1_s + later_s, last.t1_s + 50, 0, 0, 0, None, Buckets(data_wait_s=50 - later_s))
    record = rank(finished=finished, under_way=hung)
    store.write_json(tmp_path / store.RUN_FILE, run.run)
    store.write_json(tmp_path / store.rank_file(0), record)
    lines = store.LineWriter(tmp_path / store.steps_file(0))
    lines.write(run.spans[0])
    lines.close()
    buckets = make_ledger(store.load(tmp_path)).buckets
    assert buckets.data_wait_s == pytest.approx(50 - later_s if told else 0)
    assert buckets.unattributed_s == pytest.approx(later_s if told else 0)
