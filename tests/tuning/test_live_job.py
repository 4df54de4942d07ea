"""Whole jobs under `fulltilt run --auto`, and what Fulltilt predicts for a loader against what the change gives."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt import store
from fulltilt.figures import one_line
from tests.zoo.catalogue import CATALOGUE, ZOO, Specimen
from tests.zoo.observation import CPUS, observe

JOB = Path(__file__).with_name("starved_job.py")
# Runs a script as it is and with other arguments in the DataLoader call at one of its lines, in turns. One process for
# all turns: importing torch takes longer than the script.
IN_TURNS = """
import json, os, runpy, sys, time
cpus, turns, changes, line, script = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), *sys.argv[4:]
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
original = DataLoader.__init__
def __init__(self, *args, **kwargs):
    here = sys._getframe(1).f_lineno == int(line)
    original(self, *args, **{**kwargs, **(in_turn if here else {})})
DataLoader.__init__ = __init__
register_optimizer_step_post_hook(lambda *_: moments_s.append(time.perf_counter()))
sys.argv = [script]
for in_turn in ({}, changes) * turns:
    moments_s = []
    runpy.run_path(script, run_name="__main__")
    print("STEPS", json.dumps(moments_s))
"""
TURNS = 3
LOADERS = (
    *("serial_decode.py", "read_files.py", "serial_waits.py", "zip_loaders.py", "early_break.py"),
    *("worker_decode.py", "worker_waits.py", "tiny_epochs.py"),
)


@pytest.mark.slow
@pytest.mark.quiet
def test_a_starved_job_waits_at_most_half_as_long_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    job = [str(JOB), "24"]
    plain = subprocess.run([sys.executable, *job], capture_output=True, text=True, check=True)
    run = [sys.executable, "-m", "fulltilt", "run", "--auto", "--out", str(tmp_path / "run"), *job]
    auto = subprocess.run(run, capture_output=True, text=True, check=True)
    assert auto.stdout == plain.stdout
    assert "live tuning: num_workers 0 →" in one_line(auto.stderr)
    (live,) = store.load(tmp_path / "run").ranks[0].live
    before_s = live.before_wait_share / live.before_batches_per_s
    assert live.wait_share / live.batches_per_s <= before_s / 2
    found = json.loads((tmp_path / "run" / store.SETTINGS_FILE).read_text())
    assert found["num_workers"] == live.settings.num_workers > 0
    again = [sys.executable, "-m", "fulltilt", "run", "--settings", str(tmp_path / "run" / store.SETTINGS_FILE)]
    settled = subprocess.run(
        [*again, "--out", str(tmp_path / "again"), str(JOB), "2"], capture_output=True, text=True, check=True
    )
    assert "WEIGHTS" in settled.stdout
    assert store.load(tmp_path / "again").ranks[0].loaders[0].num_workers == found["num_workers"]


@pytest.mark.slow
@pytest.mark.quiet
@pytest.mark.timeout(1800)
def test_what_is_predicted_for_a_loader_is_what_the_change_gives(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Over the zoo's loader cases the measured gain lies in the predicted range in at least 80 %."""
    rows = []
    short = tmp_path_factory.mktemp("p")  # workers' sockets lie in it, and a socket's path holds 107 characters
    for specimen in CATALOGUE:
        if specimen.script in LOADERS:
            rows += list(_predicted_and_measured(specimen, short / specimen.path.stem))
    for name, low, high, gain in rows:
        print(f"{name:<20} predicted {low:.2f} to {high:.2f} ×, measured {gain:.2f} ×  {_inside(low, high, gain)}")
    assert len(rows) >= 6
    assert sum(_inside(low, high, gain) for _, low, high, gain in rows) >= 0.8 * len(rows)


def _inside(low: float, high: float, gain: float) -> bool:
    return low <= gain <= high


def _predicted_and_measured(specimen: Specimen, folder: Path) -> list[tuple[str, float, float, float]]:
    finding = observe(specimen, folder).found
    changes = {name: int(value) for name, value in re.findall(r"(num_workers|prefetch_factor)=(\d+)", finding["fix"])}
    if "persistent_workers=True" in finding["fix"]:
        changes["persistent_workers"] = True
    if not changes or finding["predicted_speedup"] is None:
        return []
    low, high = finding["predicted_speedup"]
    line = re.findall(r" at \S+?\.py:(\d+)", finding["fix"])
    where = int(line[0] if line else finding["where"].rpartition(":")[2])
    gains = sorted(_gains(specimen, changes, where))
    return [(specimen.script, low, high, gains[TURNS // 2])]


def _gains(specimen: Specimen, changes: dict[str, int | bool], line: int) -> list[float]:
    """How many times as fast the script was with the changes, in each turn."""
    done = subprocess.run(
        [sys.executable, "-c", IN_TURNS, str(CPUS), str(TURNS), json.dumps(changes), str(line), str(specimen.path)],
        env={**os.environ, "PYTHONPATH": str(ZOO)},
        capture_output=True,
        text=True,
        check=True,
    )
    told = [json.loads(line.removeprefix("STEPS ")) for line in done.stdout.splitlines() if line.startswith("STEPS ")]
    # Workers deliver in bursts, and the first burst comes with the first batch: a line through all steps, not the time
    # from the first to the last.
    rates = [statistics.linear_regression(moments_s, range(len(moments_s))).slope for moments_s in told]
    assert len(rates) == 2 * TURNS
    return [changed / plain for plain, changed in zip(rates[::2], rates[1::2], strict=True)]
