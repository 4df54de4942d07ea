"""The benchmarks run; their figures on a busy CPU mean nothing, their shape does."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"
# Counted from the start of the process, which under pytest lies long before the benchmark's.
NO_BUDGET = ["--budget-s", "1e9"]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(BENCH)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(name: str, monkeypatch: pytest.MonkeyPatch, out: Path, *given: str, **constants: Any) -> Any:
    """The benchmark's ``main`` in this process, which has torch already; its exit code and its figures."""
    module = importlib.import_module(name)
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *given, "--out", str(out)])
    return module.main() or 0, json.loads(out.read_text())


def test_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--pairs", "2", "--block-steps", "4", "--warm-up-s", "0.5", "--device", "cpu", "--only", "fulltilt"]
    found_in = tmp_path / "overhead.json"
    code, found = run("overhead", monkeypatch, found_in, *given, "--job", "workers", BLOCK_WARM_UP_STEPS=5)
    assert code == 0
    (row,) = found["results"]
    assert row["plain_step_ms"] > 0.0
    assert row["observed_step_ms"] > 0.0
    assert "10 ms, workers" in capsys.readouterr().out


def test_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--cpu", "--seeds", "2", "--epochs", "1", "--pictures", "8", "--size", "32", "--batch-size", "4"]
    code, found = run("parity", monkeypatch, tmp_path / "parity.json", *given)
    assert code == (0 if found["comparison"]["within_noise"] else 1)
    assert {way: len(values) for way, values in found["iou"].items()} == {"device": 2, "cpu": 2}
    assert "over 2 seeds" in capsys.readouterr().out


@pytest.mark.slow
def test_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run("engine", monkeypatch, tmp_path / "engine.json", "--smoke")
    assert code == 0
    assert not [part for part in found.values() if isinstance(part, dict) and "error" in part]
    assert all(one["engine_share_of_hand_speed"] > 0.0 for one in found["loops"].values())
    assert "engine / hand-written loop, plain" in capsys.readouterr().out


@pytest.mark.slow
def test_augment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run("augment", monkeypatch, tmp_path / "augment.json", "--smoke", *NO_BUDGET)
    assert code == 0
    assert [row["chain"] for row in found["rows"]] == ["whole", "resized crop", "jitter", "affine", "flip"]
    assert not [key for row in found["rows"] for key in row if key.endswith("_failed")]
    assert all(row["ours"] > 0.0 and row["torchvision_per_sample"] > 0.0 for row in found["rows"])
    assert "resized crop" in capsys.readouterr().out


@pytest.mark.parametrize(
    "row", ["hdf5", *(pytest.param(row, marks=pytest.mark.slow) for row in ("cod", "carclip", "visobert"))]
)
@pytest.mark.slow
def test_recipes(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, as the benchmark's own child runs it; the table is made of what it wrote."""
    given = ["--smoke", "--child", row, "--budget-s", "60"]
    code, found = run("recipes", monkeypatch, tmp_path / "recipes.json", *given)
    assert code == 0, found
    assert "failed" not in found
    assert found["fed_over_compute"] > 0.0
    table = importlib.import_module("recipes").table({row: found})
    assert f"{row}: fed ÷ compute-only" in table


@pytest.mark.parametrize(
    "job", ["hdf5", *(pytest.param(job, marks=pytest.mark.slow) for job in ("cod", "clip", "text"))]
)
@pytest.mark.slow
def test_feed(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, as the benchmark's own child runs it."""
    feed = importlib.import_module("feed")
    arguments = argparse.Namespace(workers="1", parts="stock,tiers", smoke=True, flips_only=False, turns=2)
    out = tmp_path / "feed.json"
    assert feed.measure(job, out, 60.0, arguments) == 0, out.read_text()
    figures = json.loads(out.read_text())
    assert figures.pop("machine")["versions"]["torch"]
    assert not [name for part in figures.values() for name in part if name.endswith("failed")]
    assert all(part["fed_over_compute"] > 0.0 for part in figures.values())
    assert next(iter(figures)) in feed.table(figures)
