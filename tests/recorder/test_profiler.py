"""Kernels of a few steps: gaps are no work, overlapping ones count once, bursts add up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fulltilt.recorder.profiler import KernelTotals


def kernel(name: str, start_us: float, end_us: float) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start_us, end=end_us))


def test_gaps_between_kernels_are_no_work() -> None:
    totals = KernelTotals()
    totals.add([kernel("relu", 0, 10), kernel("relu", 15, 25), kernel("add", 20, 30)], steps=1)
    record = totals.record()
    assert record is not None
    assert record.busy_s == pytest.approx(25e-6)
    assert record.kernels == 3
    assert record.tensor_core_share is None
    assert [line.function for line in record.top_kernels] == ["relu", "add"]


def test_bursts_give_the_mean_step() -> None:
    totals = KernelTotals()
    totals.add([kernel("Memcpy HtoD (Pinned -> Device)", 0, 30), kernel("sm90_bf16_gemm", 30, 60)], steps=3)
    totals.add([kernel("sm90_bf16_gemm", 0, 15), kernel("f32_sgemm_gemm", 15, 20)], steps=1)
    record = totals.record()
    assert record is not None
    assert record.steps == 4
    assert record.busy_s == pytest.approx(20e-6)
    assert record.copies_s == pytest.approx(7.5e-6)
    assert record.tensor_core_share == pytest.approx(45 / 50)


def test_nothing_seen_is_no_record() -> None:
    totals = KernelTotals()
    totals.add([], steps=3)
    assert totals.record() is None
