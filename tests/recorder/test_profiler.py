"""Kernels of a few steps: gaps are no work, overlapping ones count once, bursts add up."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from fulltilt.recorder.profiler import KernelTotals, deep_record


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


def test_deep_steps_tell_gaps_and_waits_by_line() -> None:
    events = [kernel("relu", 0, 10), kernel("add", 30, 40), kernel("cudaStreamSynchronize", 0, 8)]
    for event, kind in zip(events, ("CUDA", "CUDA", "CPU"), strict=True):
        event.device_type = SimpleNamespace(name=kind)
    totals = KernelTotals()
    totals.add(events[:2], steps=2)
    record = deep_record(events, 2, totals.record(), Counter({"train.py:7": 3, "train.py:9": 1}))
    assert (record.step_s, record.gpu_busy_s, record.kernel_gaps_s) == pytest.approx((20e-6, 10e-6, 10e-6))
    assert [(line.where, line.seconds) for line in record.sync_calls] == [
        ("train.py:7", pytest.approx(3e-6)),
        ("train.py:9", pytest.approx(1e-6)),
    ]
