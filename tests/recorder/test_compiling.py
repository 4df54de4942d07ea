"""torch.compile: compiling is start-up whenever it comes, and starting again is counted with its reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import time, torch; torch.set_num_threads(1)
def backend(module, inputs):
    time.sleep(1.0)
    return module.forward
model = torch.nn.Linear(64, 4)
compiled = torch.compile(model, backend=backend, dynamic=False)
@torch.compile(backend="eager")
def scaled(rows):
    rows = rows * 2
    torch._dynamo.graph_break()
    return rows / 2
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(150):
    rows = torch.randn(64 if step < 100 else 32, 64)
    loss = compiled(scaled(rows) if step == 0 else rows).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.005)
"""


@pytest.mark.slow
def test_compiling_again_is_start_up_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "fulltilt", "run", "--out", "out", "job.py"]
    assert subprocess.run(command, check=False, cwd=tmp_path, timeout=240).returncode == 0
    record = json.loads((tmp_path / "out/rank-0.json").read_text())["compile"]
    assert record["compiles"] == 4  # two of the model, and a function in two parts
    assert record["graph_breaks"] == 1
    assert "graph_break()" in record["break_reasons"][0]
    assert record["recompiles"] == 1
    assert record["seconds"] > 2.0
    assert "size mismatch" in record["recompile_lines"][0]["call"]
    spans = [json.loads(line) for line in (tmp_path / "out/steps.jsonl").read_text().splitlines()]
    later = [span for span in spans if span.get("first_step", 0) >= 50]
    assert sum(span["buckets"].get("startup_s", 0.0) for span in later) > 1.0
    assert sum(span["buckets"].get("compute_s", 0.0) for span in spans) < 1.0
