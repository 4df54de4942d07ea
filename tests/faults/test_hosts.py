"""An elastic job over two hosts: one dies, training goes on without it and with it again, each sample once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults.host_job import BATCH, EPOCHS, SAMPLES

PROJECT = Path(__file__).parents[2]


def namespaces() -> bool:
    if not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip")):
        return False
    return subprocess.run(["unshare", "-Urn", "true"], capture_output=True, check=False).returncode == 0


def trained(out: Path) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
    """The starts as (ranks, resumed at), and the samples of every step that the last checkpoint is made of.

    A start counts up to the step at which the next one resumed; what it did beyond that was lost with it.
    """
    journals = [[json.loads(line) for line in path.read_text().splitlines()] for path in out.glob("journal.*.jsonl")]
    starts: dict[str, dict[str, Any]] = {}
    steps: dict[str, list[dict[str, Any]]] = {}
    for journal in journals:
        header = next((line for line in journal if "start" in line), None)
        if header is not None:  # a process that did not complete a step has left nothing behind
            steps.setdefault(header["start"], []).extend(line for line in journal if "step" in line)
            first = starts.setdefault(header["start"], header)
            first["began_s"] = min(first["began_s"], header["began_s"])
    ordered = sorted(starts.values(), key=lambda header: float(header["began_s"]))
    ends = [following["resumed"] for following in ordered[1:]] + [EPOCHS * SAMPLES // BATCH]
    used: dict[int, list[int]] = {}
    for header, end in zip(ordered, ends, strict=True):
        for line in steps[header["start"]]:
            if header["resumed"] < line["step"] <= end:
                used.setdefault(line["step"], []).extend(line["ids"])
    return [(header["world"], header["resumed"]) for header in ordered], used


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not namespaces(), reason="this machine gives no network namespaces")
def test_one_host_of_two_dies_and_comes_back(tmp_path: Path) -> None:
    command = ["unshare", "-Urn", sys.executable, "-m", "tests.faults.two_hosts", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=500, check=False)
    logs = "".join(path.read_text() for path in tmp_path.glob("host?.log"))
    assert done.returncode == 0, done.stderr + logs
    starts, used = trained(tmp_path)
    assert [world for world, _ in starts] == [2, 1, 2], starts
    assert starts[1][1] >= 8
    assert starts[2][1] >= 20
    assert sorted(used) == list(range(1, EPOCHS * SAMPLES // BATCH + 1))
    assert all(len(ids) == BATCH for ids in used.values())
    per_epoch = SAMPLES // BATCH
    for epoch in range(EPOCHS):
        counted = Counter(i for step in range(epoch * per_epoch, (epoch + 1) * per_epoch) for i in used[step + 1])
        assert counted == Counter(range(SAMPLES)), f"epoch {epoch}"
