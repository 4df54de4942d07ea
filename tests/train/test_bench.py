"""The benchmark runs; its figures on a CPU mean nothing, its shape does."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_smoke_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "engine.json"
    monkeypatch.setattr(sys, "argv", ["engine.py", "--smoke", "--out", str(out)])
    runpy.run_path(str(Path(__file__).parents[2] / "bench" / "engine.py"), run_name="__main__")
    found = json.loads(out.read_text())
    assert not [part for part in found.values() if isinstance(part, dict) and "error" in part]
    assert found["out_of_memory"]["survived"]
    assert found["out_of_memory"]["micro_batch_after"] == 2
    assert all(one["engine_share_of_hand_speed"] > 0.0 for one in found["loops"].values())
    assert "engine / hand-written loop, plain" in capsys.readouterr().out
