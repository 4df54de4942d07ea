"""A few steps under torch.profiler, for what only it sees.

On a GPU, three steps now and then for the time in which kernels really run: events at a step's ends also count the gaps
between them. With `--deep N`, N steps with the host's side of them: copies, waits and their lines.
"""

from __future__ import annotations

import importlib
import os
import re
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from fulltilt.recorder.hooks import Function, Patches
from fulltilt.recorder.marks import Activity
from fulltilt.recorder.recorder import Recorder
from fulltilt.recorder.stacks.frames import users_line
from fulltilt.records import DeepRecord, HotLine, KernelRecord

# Steps before the profiler starts: compilation, autotuning and the allocator have settled by then.
WARM_UP_STEPS = 10
# Runtime calls during which the host waits for the GPU.
WAITS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"})
COPIES = ("Memcpy HtoD", "Memcpy DtoH")
SYNC_WARNING = "called a synchronizing CUDA operation"
SYNC_NOTICE = "Synchronization debug mode is a prototype"
MATMUL = re.compile(r"gemm|matmul|cutlass|wgmma|conv|xmma|mma_|nvjet|flash|fmha", re.IGNORECASE)
TENSOR_CORE = re.compile(
    r"tensorop|s\d{4,}|hmma|imma|wgmma|bf16|f16|half|tf32|sm90|nvjet|flash|fmha|fp8", re.IGNORECASE
)


# The first burst takes 0.2 to 0.8 s on an H200, most of it CUPTI's start; shorter jobs than this do without.
BURST_STEPS = 3
FIRST_BURST_STEP, FIRST_BURST_S = 30, 20.0
AGAIN = 4  # the next burst comes at so many times the step
# With it, Kineto lets go of CUPTI at the end; otherwise each launch stays up to a fifth dearer until the process ends.
RELEASE_CUPTI = "TEARDOWN_CUPTI"


class KernelBursts:
    """Traces kernels for three steps now and then, and keeps the mean over all of them."""

    def __init__(self, torch: Any, recorder: Recorder) -> None:
        self._torch, self._recorder = torch, recorder
        self._calls = 0
        self._at_call = FIRST_BURST_STEP
        self._first_ns = 0
        self._profiler: Any = None
        self._released: str | None = None
        self._totals = KernelTotals()
        self._patches = Patches()

    def install(self, patches: Patches) -> None:
        """Count steps."""
        hooks = importlib.import_module(self._torch.optim.Optimizer.__module__)
        patches.undo_by(hooks.register_optimizer_step_post_hook(self._stepped).remove)

    def _stepped(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._recorder.clock is None or not self._recorder.mine():
            return
        self._calls += 1
        if self._calls == 1:
            self._first_ns = time.perf_counter_ns()
        elif self._profiler is not None:
            if self._calls >= self._at_call + BURST_STEPS:
                self.stop()
        elif self._calls >= self._at_call and time.perf_counter_ns() - self._first_ns > FIRST_BURST_S * 1e9:
            self._at_call = self._calls
            self._start()

    def _start(self) -> None:
        """Begin, unless the script profiles itself or replays CUDA graphs, which CUPTI cannot be taken from safely."""
        recorder, torch = self._recorder, self._torch
        profiled = torch.autograd._profiler_enabled() or "NSYS_PROFILING_SESSION_ID" in os.environ
        if profiled or recorder.profiling or recorder.state.uses_cuda_graphs or recorder.calibration.under_way:
            self._at_call = self._calls * 2
            return
        recorder.wake()
        before = recorder.switch(Activity.OBSERVER)
        self._released = os.environ.get(RELEASE_CUPTI)
        os.environ[RELEASE_CUPTI] = "1"
        try:
            torch.cuda.synchronize()  # what was queued before is not of these steps
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self._profiler.start()
            # Two profilers at once are an error: where the script starts its own, ours ends first.
            self._patches.swap(torch.autograd.profiler.profile, "__init__", self._give_way)
            recorder.profiling = True
        except Exception as error:
            self._profiler = None
            self._end(f"kernels could not be traced: {error}")
        finally:
            recorder.switch(before)

    def _give_way(self, original: Function) -> Function:
        def init(profile: Any, *args: Any, **kwargs: Any) -> None:
            self.stop()
            original(profile, *args, **kwargs)

        return init

    def stop(self) -> None:
        """End a burst that is under way and take it in."""
        if self._profiler is None:
            return
        recorder, profiler, self._profiler = self._recorder, self._profiler, None
        before = recorder.switch(Activity.OBSERVER)
        steps = self._calls - self._at_call
        problem = None
        try:
            self._patches.restore()
            profiler.stop()
            self._totals.add([event for event in profiler.events() if _on_gpu(event)], steps)
            recorder.state.kernels = self._totals.record()
        except Exception as error:
            problem = f"kernels could not be traced: {error}"
        finally:
            self._end(problem)
            recorder.switch(before)

    def _end(self, problem: str | None) -> None:
        self._recorder.profiling = False
        self._at_call = self._calls * AGAIN
        if self._released is None:
            os.environ.pop(RELEASE_CUPTI, None)
        else:
            os.environ[RELEASE_CUPTI] = self._released
        if problem is not None:
            self._recorder.state.remark(problem)


class KernelTotals:
    """Kernels of all bursts so far."""

    def __init__(self) -> None:
        self._steps = self._kernels = 0
        self._busy_us = self._copies_us = self._products_us = self._tensor_core_us = 0.0
        self._by_name: dict[str, float] = {}

    def add(self, kernels: list[Any], steps: int) -> None:
        """Take in a burst of so many steps."""
        if not kernels or steps <= 0:
            return
        self._steps += steps
        self._kernels += len(kernels)
        self._busy_us += _covered([(event.time_range.start, event.time_range.end) for event in kernels])
        for event in kernels:
            length = _length(event)
            self._by_name[event.name] = self._by_name.get(event.name, 0.0) + length
            if event.name.startswith(COPIES):
                self._copies_us += length
            if MATMUL.search(event.name):
                self._products_us += length
                self._tensor_core_us += length if TENSOR_CORE.search(event.name) else 0.0

    def record(self) -> KernelRecord | None:
        """The mean step; None while nothing was seen."""
        if not self._steps:
            return None
        per_step = 1e-6 / self._steps
        return KernelRecord(
            steps=self._steps,
            busy_s=self._busy_us * per_step,
            copies_s=self._copies_us * per_step,
            kernels=round(self._kernels / self._steps),
            tensor_core_share=self._tensor_core_us / self._products_us if self._products_us else None,
            top_kernels=_top((name, cost_us / self._steps) for name, cost_us in self._by_name.items()),
        )


class DeepProfile:
    """Profiles N steps once the job has warmed up, and leaves what it saw in the rank's state."""

    def __init__(self, torch: Any, recorder: Recorder, steps: int) -> None:
        self._torch = torch
        self._recorder = recorder
        self._steps = steps
        self._seen = 0
        self._profiler: Any = None
        self._waits: WaitLines | None = None
        self._handle: Any = None

    def install(self) -> None:
        """Count steps; the profiler starts when the job is warm."""
        hooks = importlib.import_module(self._torch.optim.Optimizer.__module__)
        self._handle = hooks.register_optimizer_step_post_hook(self._stepped)

    def stop(self) -> None:
        """Summarise what was seen, also when the job ends before N steps."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._profiler is not None:
            self._summarise()
        elif self._recorder.state.deep is None and self._seen:
            self._recorder.state.remark(f"--deep: the job ended after {self._seen} steps, before the profiler started")

    def _stepped(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._recorder.mine():
            return
        self._seen += 1
        if self._seen == WARM_UP_STEPS:
            self._start()
        elif self._seen == WARM_UP_STEPS + self._steps and self._profiler is not None:
            self._summarise()

    def _start(self) -> None:
        self._recorder.wake()
        before = self._recorder.switch(Activity.OBSERVER)
        try:
            kinds = self._torch.profiler.ProfilerActivity
            activities = [kinds.CPU, *([kinds.CUDA] if self._recorder.clock is not None else [])]
            self._profiler = self._torch.profiler.profile(activities=activities)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._profiler.start()
            self._recorder.profiling = True
            if self._recorder.clock is not None:
                self._waits = WaitLines(self._torch)
        except Exception as error:
            self._profiler = None
            self._recorder.state.deep = DeepRecord(0, 0.0, None, None, None, None, None, error=str(error))
        finally:
            self._recorder.switch(before)

    def _summarise(self) -> None:
        before = self._recorder.switch(Activity.OBSERVER)
        profiler, self._profiler = self._profiler, None
        self._recorder.profiling = False
        steps = max(1, self._seen - WARM_UP_STEPS)
        try:
            profiler.stop()
            waits = self._waits.stop() if self._waits is not None else {}
            self._recorder.state.deep = summarise(profiler.events(), steps, waits)
        except Exception as error:
            self._recorder.state.deep = DeepRecord(steps, 0.0, None, None, None, None, None, error=str(error))
        finally:
            self._recorder.switch(before)


class WaitLines:
    """Lets torch itself name the lines that wait for the GPU, through the warnings of its debug mode."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._mode = torch.cuda.get_sync_debug_mode()
        self._guard = warnings.catch_warnings()
        self._guard.__enter__()
        self._show = warnings.showwarning
        self._seen: dict[str, int] = {}
        warnings.filterwarnings("always", message=f".*{SYNC_WARNING}.*")
        warnings.showwarning = self._take
        torch.cuda.set_sync_debug_mode("warn")

    def _take(self, message: Any, *rest: Any, **more: Any) -> None:
        if SYNC_WARNING in str(message):
            where, _ = users_line()
            self._seen[where] = self._seen.get(where, 0) + 1
        elif SYNC_NOTICE not in str(message):
            self._show(message, *rest, **more)

    def stop(self) -> dict[str, int]:
        """Put the debug mode and the warnings back; returns how often each line waited."""
        self._torch.cuda.set_sync_debug_mode(self._mode)
        self._guard.__exit__(None, None, None)
        return self._seen


def summarise(events: Iterable[Any], steps: int, waits: Mapping[str, int]) -> DeepRecord:
    """What a profile of ``steps`` steps says, per step. ``waits`` counts the synchronising calls by line."""
    events = list(events)
    kernels = [event for event in events if _on_gpu(event)]
    first = min((event.time_range.start for event in kernels or events), default=0.0)
    last = max((event.time_range.end for event in kernels or events), default=0.0)
    per_step = 1e-6 / steps
    if not kernels:
        top = _top((event.name, event.self_cpu_time_total) for event in events if "::" in event.name)
        return DeepRecord(steps, (last - first) * per_step, None, None, None, None, None, top_kernels=top)
    busy = _covered([(event.time_range.start, event.time_range.end) for event in kernels])
    copies = sum(_length(event) for event in kernels if event.name.startswith(COPIES))
    return DeepRecord(
        steps=steps,
        step_s=(last - first) * per_step,
        gpu_busy_s=busy * per_step,
        kernel_gaps_s=(last - first - busy) * per_step,
        copies_s=copies * per_step,
        kernels=round(len(kernels) / steps),
        tensor_core_share=_tensor_core_share(kernels),
        top_kernels=_top((event.name, _length(event)) for event in kernels),
        sync_calls=_waits(events, waits),
    )


def _on_gpu(event: Any) -> bool:
    if getattr(event.device_type, "name", "CPU") != "CUDA":
        return False
    # Annotations stretch over the kernels of a whole phase; they are no work of their own.
    return not (getattr(event, "is_user_annotation", False) or event.name.startswith(("ProfilerStep", "Optimizer.")))


def _length(event: Any) -> float:
    return float(event.time_range.end - event.time_range.start)


def _covered(ranges: list[tuple[float, float]]) -> float:
    """The length of the union of ranges."""
    total = reached = 0.0
    for begin, end in sorted(ranges):
        start = max(begin, reached)
        if end > start:
            total += end - start
            reached = end
    return total


def _tensor_core_share(kernels: list[Any]) -> float | None:
    """The share of matrix-product time that ran on tensor cores, by the kernels' names; None without any product."""
    products = [event for event in kernels if MATMUL.search(event.name)]
    total = sum(_length(event) for event in products)
    if not total:
        return None
    return float(sum(_length(event) for event in products if TENSOR_CORE.search(event.name)) / total)


def _top(costs: Iterable[tuple[str, float]], most: int = 10) -> tuple[HotLine, ...]:
    totals: dict[str, float] = {}
    for name, cost_us in costs:
        totals[name] = totals.get(name, 0.0) + cost_us
    ranked = sorted(totals.items(), key=lambda item: -item[1])[:most]
    return tuple(HotLine(where="", function=name, seconds=cost * 1e-6) for name, cost in ranked)


def _waits(events: list[Any], waits: Mapping[str, int]) -> tuple[HotLine, ...]:
    """Synchronising calls by line. The time in all of them is shared out by how often each line made one."""
    total_s = sum(_length(event) for event in events if event.name in WAITS) * 1e-6
    calls = sum(waits.values())
    ranked = sorted(waits.items(), key=lambda item: -item[1])[:10]
    return tuple(HotLine(where, "", total_s * count / calls, f"{count} times") for where, count in ranked)
