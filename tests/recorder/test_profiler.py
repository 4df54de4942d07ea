"""Kernels of a few steps: gaps are no work, overlapping ones count once, bursts add up."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fulltilt.recorder.profiler import AGAIN, FlopCount, Kernel, KernelTotals, StepProfiler, deep_record, kernels_among


def test_annotations_are_no_kernels() -> None:
    def event(name: str, kind: str, annotation: bool = False) -> Any:
        told = {"name": name, "device_type": SimpleNamespace(name=kind), "is_user_annotation": annotation}
        told |= {"start_ns": 1_794_970_318_761_007_953 + 400 * (name == "add"), "duration_ns": 300}
        return SimpleNamespace(**{key: (lambda value=value: value) for key, value in told.items()})

    events = [event("relu", "CUDA"), event("aten::relu", "CPU"), event("forward", "CUDA", annotation=True)]
    found = kernels_among([*events, event("ProfilerStep#3", "CUDA"), event("add", "CUDA")])
    assert [kernel.name for kernel in found] == ["relu", "add"]
    assert [kernel[1:] for kernel in found] == [pytest.approx((0.0, 0.3)), pytest.approx((0.4, 0.7))]


def test_gaps_between_kernels_are_no_work() -> None:
    totals = KernelTotals()
    totals.add([Kernel("relu", 0, 10), Kernel("relu", 15, 25), Kernel("add", 20, 30)], steps=1)
    record = totals.record()
    assert record is not None
    assert record.busy_s == pytest.approx(25e-6)
    assert record.kernels == 3
    assert record.tensor_core_share is None
    assert [line.function for line in record.top_kernels] == ["relu", "add"]


def test_bursts_give_the_mean_step() -> None:
    totals = KernelTotals()
    totals.add([Kernel("Memcpy HtoD (Pinned -> Device)", 0, 30), Kernel("sm90_bf16_gemm", 30, 60)], steps=3)
    totals.add([Kernel("sm90_bf16_gemm", 0, 15), Kernel("f32_sgemm_gemm", 15, 20)], steps=1)
    record = totals.record()
    assert record is not None
    assert record.steps == 4
    assert record.busy_s == pytest.approx(12.5e-6)  # of kernels alone
    assert record.copies_s == pytest.approx(7.5e-6)
    assert record.tensor_core_share == pytest.approx(45 / 50)


def test_nothing_seen_is_no_record() -> None:
    totals = KernelTotals()
    totals.add([], steps=3)
    assert totals.record() is None


def test_deep_steps_tell_gaps_and_waits_by_line() -> None:
    kernels = [Kernel("relu", 0, 10), Kernel("add", 30, 40)]
    events = [SimpleNamespace(name="cudaStreamSynchronize", time_range=SimpleNamespace(start=0, end=8))]
    totals = KernelTotals()
    totals.add(kernels, steps=2)
    record = deep_record(events, kernels, 2, totals.record(), Counter({"train.py:7": 3, "train.py:9": 1}))
    assert (record.step_s, record.gpu_busy_s, record.kernel_gaps_s) == pytest.approx((20e-6, 10e-6, 10e-6))
    assert [(line.where, line.seconds) for line in record.sync_calls] == [
        ("train.py:7", pytest.approx(3e-6)),
        ("train.py:9", pytest.approx(1e-6)),
    ]


def test_the_flops_of_a_step_are_those_of_its_matrix_products() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64, bias=False), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    recorder: Any = SimpleNamespace(eval_mode=False)
    count = FlopCount(recorder, calls=1)
    model(torch.randn(16, 32)).sum().backward()
    recorder.eval_mode = True
    model(torch.randn(16, 32))
    forward = 2 * 16 * (32 * 64 + 64 * 8)
    # Backward has two products for each in forward, but none for the inputs' own gradient.
    assert count.stop() == forward + 2 * forward - 2 * 16 * 32 * 64
    after = torch.randn(4, 4) @ torch.randn(4, 4)
    assert after.shape == (4, 4)
    assert count.stop() is None


def test_a_mode_of_the_scripts_own_stays_in_force() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

    class Own(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    recorder: Any = SimpleNamespace(eval_mode=False)
    count = FlopCount(recorder)
    with Own() as own:
        assert count.stop() is None
        assert _get_current_dispatch_mode() is own
    torch.randn(4, 4) @ torch.randn(4, 4)
    _get_current_dispatch_mode().__exit__(None, None, None)


def test_a_trace_that_cannot_begin_is_not_tried_at_every_step() -> None:
    told: list[str] = []
    state = SimpleNamespace(remark=told.append)
    recorder: Any = SimpleNamespace(switch=lambda activity: activity, clock=None, state=state, profiling=True)
    profiler = StepProfiler(torch, recorder)
    profiler._calls, profiler._settles_at_ns = 50, 1
    profiler._profiler = SimpleNamespace()  # without start_trace
    profiler._trace()
    assert "kernels could not be traced" in told[0]
    assert profiler._at_call == 50 * AGAIN
    assert not recorder.profiling


def test_bursts_take_at_most_half_a_percent_of_a_job_that_has_had_one(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(kernels=None)
    recorder: Any = SimpleNamespace(
        switch=lambda activity: activity, state=state, clock=object(), on_training_thread=lambda: True
    )
    profiler = StepProfiler(torch, recorder)
    began: list[float] = []
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(now_s * 1e9))

    def burst() -> None:
        nonlocal now_s
        began.append(now_s)
        with profiler._own_work():
            now_s += 0.8
        state.kernels = object()
        profiler._at_call = profiler._calls * AGAIN

    monkeypatch.setattr(profiler, "_start", burst)
    profiler._counted = True
    for _ in range(10_000):
        now_s += 0.1
        profiler._stepped(None, (), {})
    assert 8 < began[0] < 9
    assert 160 <= began[1] < 162
    assert 0.8 * len(began) <= 0.005 * now_s
