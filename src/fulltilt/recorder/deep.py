"""`--deep N`: a few steps under torch.profiler, for what only it sees: kernel gaps, copies, waits and their lines."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from fulltilt.recorder.marks import Activity
from fulltilt.recorder.recorder import Recorder
from fulltilt.recorder.stacks.frames import users_line
from fulltilt.records import DeepRecord, HotLine

# Steps before the profiler starts: compilation, autotuning and the allocator have settled by then.
WARM_UP_STEPS = 10
# Runtime calls during which the host waits for the GPU.
WAITS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"})
SYNC_WARNING = "called a synchronizing CUDA operation"
SYNC_NOTICE = "Synchronization debug mode is a prototype"
MATMUL = re.compile(r"gemm|matmul|cutlass|wgmma|conv|xmma|mma_|nvjet|flash|fmha", re.IGNORECASE)
TENSOR_CORE = re.compile(
    r"tensorop|s\d{4,}|hmma|imma|wgmma|bf16|f16|half|tf32|sm90|nvjet|flash|fmha|fp8", re.IGNORECASE
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
    copies = sum(_length(event) for event in kernels if event.name.startswith(("Memcpy HtoD", "Memcpy DtoH")))
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
