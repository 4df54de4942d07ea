"""A few steps under torch.profiler, for what only it can measure.

On a GPU, three steps now and then, for the time in which kernels run: events at a step's ends also count the gaps
between kernels. With `--deep N`, N steps with the host's side of them instead: copies, waits and their lines.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fulltilt.recorder.hooks import Function, Patches
from fulltilt.recorder.marks import Activity, Totals
from fulltilt.recorder.recorder import Recorder
from fulltilt.recorder.stacks.frames import users_line
from fulltilt.records import CommunicationRecord, DeepRecord, HotLine, KernelRecord

# Runtime calls during which the host waits for the GPU.
WAITS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"})
COPIES = ("Memcpy HtoD", "Memcpy DtoH")
COLLECTIVES = ("nccl", "rccl")
SYNC_WARNING = "called a synchronizing CUDA operation"
SYNC_NOTICE = "Synchronization debug mode is a prototype"
MATMUL = re.compile(r"gemm|matmul|cutlass|wgmma|conv|xmma|mma_|nvjet|flash|fmha", re.IGNORECASE)
TENSOR_CORE = re.compile(
    r"tensorop|s\d{4,}|hmma|imma|wgmma|bf16|f16|half|tf32|sm90|nvjet|flash|fmha|fp8", re.IGNORECASE
)

# Where --deep begins: compilation, autotuning and the allocator have settled by then.
FIRST_DEEP_STEP = 10
# The first burst takes 0.2 to 0.8 s on an H200, most of it for CUPTI's start; jobs shorter than this have none.
BURST_STEPS = 3
FIRST_BURST_STEP, FIRST_BURST_S = 30, 8.0
AGAIN = 4  # the next burst comes at this many times the step
LEAST_LIFE = 200  # and once the job has trained for this many times what the bursts have taken
# The GPU is idle while CUPTI starts, and its kernels then run faster than usual for a while.
SETTLE_NS = 300_000_000
# How often a burst is repeated because an evaluation came in between.
MOST_TRIES = 8
# Makes Kineto release CUPTI at the end; otherwise each launch takes up to a fifth longer until the process ends.
RELEASE_CUPTI = "TEARDOWN_CUPTI"


class StepProfiler:
    """Traces kernels for three steps now and then, and keeps the mean over all of them; or N deep steps, once."""

    def __init__(self, torch: Any, recorder: Recorder, deep_steps: int = 0) -> None:
        self._torch, self._recorder = torch, recorder
        self._deep = deep_steps > 0  # what comes next
        self._steps = deep_steps or BURST_STEPS
        self._calls = 0
        self._at_call = FIRST_DEEP_STEP if self._deep else FIRST_BURST_STEP
        self._first_ns = 0
        self._took_ns = 0  # bursts, of the training thread's time
        self._profiler: Any = None
        self._settles_at_ns: int | None = None  # while CUPTI runs and nothing is kept yet
        self._evaluations = self._tries = 0
        self._meanwhile = contextlib.ExitStack()
        self._waits: Counter[str] = Counter()
        self._totals = KernelTotals()
        self._flops: FlopCount | None = None  # while a step is counted
        self._counted = self._deep

    def install(self, patches: Patches) -> None:
        """Count steps."""
        hooks = importlib.import_module(self._torch.optim.Optimizer.__module__)
        patches.undo_by(hooks.register_optimizer_step_post_hook(self._stepped).remove)

    def _stepped(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        recorder = self._recorder
        if not (self._deep or recorder.clock is not None) or not recorder.on_training_thread():
            return
        self._calls += 1
        if self._calls == 1:
            self._first_ns = time.perf_counter_ns()
        elif self._settles_at_ns is not None:
            if time.perf_counter_ns() >= self._settles_at_ns:
                self._trace()
        elif self._profiler is not None:
            if self._calls >= self._at_call + self._steps:
                self.stop()
        elif self._flops is not None:
            if self._calls >= self._at_call + self._flops.calls:
                self._stop_counting()
        elif (
            self._calls >= self._at_call
            and (self._deep or time.perf_counter_ns() - self._first_ns > self._not_before_ns())
            and (self._counted or not self._start_counting())
        ):
            self._start()

    def _not_before_ns(self) -> float:
        burst_before = self._recorder.state.kernels is not None
        return max(FIRST_BURST_S * 1e9, LEAST_LIFE * self._took_ns if burst_before else 0)

    @contextlib.contextmanager
    def _own_work(self) -> Iterator[None]:
        """Fulltilt's own work on the training thread. If it fails, the burst ends and the job goes on."""
        before, began_ns = self._recorder.switch(Activity.OBSERVER), time.perf_counter_ns()
        try:
            yield
        except Exception as error:
            self._profiler = None
            self._end(error)
        finally:
            self._took_ns += time.perf_counter_ns() - began_ns
            self._recorder.switch(before)

    def _start_counting(self) -> bool:
        """Count the FLOPs of the next step, once; not of compiled code, CUDA graphs and sharded tensors."""
        self._counted = True
        recorder, state = self._recorder, self._recorder.state
        if state.sharded or state.compiled or state.uses_cuda_graphs or recorder.profiling:
            return False
        with self._own_work():
            try:
                self._flops = FlopCount(recorder, calls=max(len(state.optimizers), 1))
                self._at_call, recorder.profiling = self._calls, True
            except Exception as error:
                state.remark(f"FLOPs could not be counted: {error}")
        return self._flops is not None

    def _stop_counting(self) -> None:
        counted, self._flops = self._flops, None
        self._recorder.profiling = False
        if counted is not None:
            self._recorder.state.flops_per_call = counted.stop()
        self._at_call = self._calls

    def _start(self) -> None:
        """Begin, unless the script profiles itself."""
        recorder, torch, on_gpu = self._recorder, self._torch, self._recorder.clock is not None
        profiled = torch.autograd._profiler_enabled() or "NSYS_PROFILING_SESSION_ID" in os.environ
        if profiled or recorder.profiling or recorder.calibration.under_way:
            self._at_call = self._calls * 2
            return
        self._at_call = self._calls
        recorder.resume()
        kinds = torch.profiler.ProfilerActivity
        activities = [*([kinds.CPU] if self._deep else []), *([kinds.CUDA] if on_gpu else [])]
        with self._own_work():
            if not self._deep:
                self._meanwhile.enter_context(_releasing_cupti())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._profiler = torch.profiler.profile(activities=activities)
                self._profiler.prepare_trace()
            # Two profilers at once are an error: where the script starts its own, ours ends first.
            patches = Patches()
            self._meanwhile.callback(patches.restore)
            patches.around(torch.autograd.profiler.profile, "__init__", self._give_way)
            if self._deep and on_gpu:
                self._meanwhile.enter_context(_waits_by_line(torch, self._waits))
            recorder.profiling = True
            self._settles_at_ns = time.perf_counter_ns() + SETTLE_NS
        if self._deep:
            self._trace()

    def _trace(self) -> None:
        """Keep what is seen from here on."""
        self._settles_at_ns = None
        if self._profiler is None:
            return
        with self._own_work():
            if self._recorder.clock is not None:
                self._torch.cuda.synchronize()  # what was queued before is not of these steps
            self._profiler.start_trace()
            self._at_call, self._evaluations = self._calls, self._recorder.evaluation.seen

    def _give_way(self, original: Function, *args: Any, **kwargs: Any) -> None:
        self.stop()
        original(*args, **kwargs)

    def stop(self) -> None:
        """End what is under way and take it in."""
        if self._settles_at_ns is not None:
            self._trace()  # what is prepared can be ended only once it was begun
        if self._profiler is None:
            return
        recorder, profiler, self._profiler = self._recorder, self._profiler, None
        steps = self._calls - self._at_call
        evaluated = recorder.evaluation.seen != self._evaluations
        with self._own_work():
            profiler.stop_trace()
            # Kineto's events: converting thousands of them to torch's takes half a second.
            kernels = kernels_among(profiler.profiler.kineto_results.events())
            if not evaluated or self._deep:
                self._totals.add(kernels, steps)
            recorder.state.kernels = seen = self._totals.record()
            if not recorder.state.replicas:  # DDP measures by itself, in more steps
                recorder.state.communication = self._totals.communication()
            if self._deep:
                events = list(profiler.events())
                recorder.state.deep = deep_record(events, kernels, max(1, steps), seen, self._waits)
            self._end(again=evaluated)

    def _end(self, problem: Exception | None = None, again: bool = False) -> None:
        self._meanwhile.close()
        state, self._recorder.profiling = self._recorder.state, False
        if problem is not None and self._deep:
            state.deep = DeepRecord(0, 0.0, None, None, None, None, None, error=str(problem))
        elif problem is not None:
            state.remark(f"kernels could not be traced: {problem}")
        # After deep steps, which do not release CUPTI, a burst saw no kernel (torch 2.11, H200).
        self._tries = self._tries + 1 if again and self._tries < MOST_TRIES else 0
        self._at_call = sys.maxsize if self._deep else self._calls * (1 if self._tries else AGAIN)
        self._deep = False

    def finish(self) -> None:
        """The job is over, maybe before N steps."""
        if self._deep and self._profiler is None and self._calls:
            note = f"--deep: the job ended after {self._calls} steps, before the profiler started"
            self._recorder.state.remark(note)
        if self._flops is not None:
            self._flops.stop()
        self.stop()


@contextlib.contextmanager
def _releasing_cupti() -> Iterator[None]:
    before = os.environ.get(RELEASE_CUPTI)
    os.environ[RELEASE_CUPTI] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(RELEASE_CUPTI, None)
        else:
            os.environ[RELEASE_CUPTI] = before


@contextlib.contextmanager
def _waits_by_line(torch: Any, seen: Counter[str]) -> Iterator[None]:
    """Counts the lines that wait for the GPU, by the warnings of torch's sync debug mode."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def take(message: Any, *rest: Any, **more: Any) -> None:
            if SYNC_WARNING in str(message):
                seen[users_line()[0]] += 1
            elif SYNC_NOTICE not in str(message):
                show(message, *rest, **more)

        warnings.filterwarnings("always", message=f".*{SYNC_WARNING}.*")
        warnings.showwarning = take
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


class FlopCount:
    """Counts the FLOPs of a step by torch's own formulas, from its forward alone.

    For each factor of a product that needs a gradient, backward computes a product of the same size. So backward need
    not be counted, which on a GPU runs on threads where this mode is not active.
    """

    def __init__(self, recorder: Recorder, calls: int = 1) -> None:
        """Begin, and count as many ``calls`` of optimizers: several optimizers take turns."""
        formulas = importlib.import_module("torch.utils.flop_counter").flop_registry
        self._dispatch = importlib.import_module("torch.utils._python_dispatch")
        grad_enabled = importlib.import_module("torch").is_grad_enabled
        self.calls = calls
        self._flops: float | None = 0.0

        class Counting(self._dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
            def __torch_dispatch__(mode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: N805
                out = func(*args, **(kwargs or {}))
                formula = formulas.get(getattr(func, "_overloadpacket", None)) if grad_enabled() else None
                if formula is not None and self._flops is not None and not recorder.eval_mode:
                    try:
                        factors = [arg for arg in args if getattr(arg, "requires_grad", False) and arg.dim() > 1]
                        self._flops += formula(*args, **(kwargs or {}), out_val=out) * (1 + min(len(factors), 2))
                    except Exception:  # an operation that its formula does not know
                        self._flops = None
                return out

        self._mode = Counting()
        self._mode.__enter__()

    def stop(self) -> float | None:
        """The FLOPs of one call of an optimizer; None where they could not be counted."""
        if self._dispatch._get_current_dispatch_mode() is not self._mode:
            self._flops = None  # the script has put a mode of its own on top: ours stays below, and counts no more
            return None
        self._mode.__exit__(None, None, None)
        counted, self._flops = self._flops, None
        return counted / self.calls if counted else None


class Kernel(NamedTuple):
    """A kernel or copy that the GPU ran."""

    name: str
    start_us: float
    end_us: float


def kernels_among(events: Iterable[Any]) -> list[Kernel]:
    """What the GPU ran, with times since the first event: as floats, times since 1970 are too coarse."""
    found: list[tuple[str, int, int]] = []
    for event in events:
        # Annotations span the kernels of a whole phase; they are not work.
        if event.device_type().name == "CUDA" and not event.is_user_annotation():
            name = event.name()
            if not name.startswith(("ProfilerStep", "Optimizer.")):
                found.append((name, event.start_ns(), event.duration_ns()))
    first_ns = min((start_ns for _, start_ns, _ in found), default=0)
    return [
        Kernel(name, (start_ns - first_ns) * 1e-3, (start_ns - first_ns + length_ns) * 1e-3)
        for name, start_ns, length_ns in found
    ]


class KernelTotals:
    """Kernels of all bursts so far."""

    def __init__(self) -> None:
        self._steps = self._kernels = 0
        self._busy_us = self._copies_us = self._products_us = self._tensor_core_us = 0.0
        self._exchange_us = self._exposed_us = 0.0
        self._by_name: Totals[str] = Totals()

    def add(self, kernels: list[Kernel], steps: int) -> None:
        """Add a burst of this many steps."""
        if not kernels or steps <= 0:
            return
        self._steps += steps
        self._kernels += len(kernels)
        exchange = [event for event in kernels if event.name.startswith(COLLECTIVES)]
        # A copy from pageable memory waits for the host, and for the profiler: that is not the GPU's work.
        kernels_us = _covered([event for event in kernels if not event.name.startswith(COPIES)])
        self._busy_us += kernels_us
        self._exchange_us += _covered(exchange)
        own = [event for event in kernels if not event.name.startswith((*COPIES, *COLLECTIVES))]
        self._exposed_us += kernels_us - _covered(own)
        for event in kernels:
            length = event.end_us - event.start_us
            self._by_name[event.name] += length
            if event.name.startswith(COPIES):
                self._copies_us += length
            if MATMUL.search(event.name):
                self._products_us += length
                self._tensor_core_us += length if TENSOR_CORE.search(event.name) else 0.0

    def communication(self) -> CommunicationRecord | None:
        """The collectives of a step, and how much of them other kernels hide; None where none was seen."""
        if not self._steps or not self._exchange_us:
            return None
        per_step = 1e-6 / self._steps
        hidden_us = self._exchange_us - self._exposed_us
        return CommunicationRecord(self._exchange_us * per_step, hidden_us * per_step)

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
            top_kernels=_top(self._by_name, self._steps),
        )


def deep_record(
    events: list[Any], kernels: list[Kernel], steps: int, seen: KernelRecord | None, waits: Counter[str]
) -> DeepRecord:
    """A profile of ``steps`` steps as a record, per step. ``waits`` counts the synchronising calls by line."""
    ranges = [(event.time_range.start, event.time_range.end) for event in events]
    if seen is not None:
        ranges = [(kernel.start_us, kernel.end_us) for kernel in kernels]
    first = min((begin for begin, _ in ranges), default=0.0)
    last = max((end for _, end in ranges), default=0.0)
    step_s, busy_s = (last - first) * 1e-6 / steps, _covered(kernels) * 1e-6 / steps
    if seen is None:
        operations: Totals[str] = Totals()
        for event in events:
            if "::" in event.name:
                operations[event.name] += event.self_cpu_time_total
        return DeepRecord(steps, step_s, None, None, None, None, None, top_kernels=_top(operations, steps))
    return DeepRecord(
        steps=steps,
        step_s=step_s,
        gpu_busy_s=busy_s,
        kernel_gaps_s=step_s - busy_s,
        copies_s=seen.copies_s,
        kernels=seen.kernels,
        tensor_core_share=seen.tensor_core_share,
        top_kernels=seen.top_kernels,
        sync_calls=_wait_lines(events, steps, waits),
    )


def _covered(kernels: list[Kernel]) -> float:
    """The length of the union of what they cover."""
    total = reached = 0.0
    for begin, end in sorted((kernel.start_us, kernel.end_us) for kernel in kernels):
        start = max(begin, reached)
        if end > start:
            total += end - start
            reached = end
    return total


def _top(costs_us: Totals[str], steps: int) -> tuple[HotLine, ...]:
    """The costliest, each with its cost in a step."""
    ranked = sorted(costs_us.items(), key=lambda item: -item[1])[:10]
    return tuple(HotLine(where="", function=name, seconds=cost_us * 1e-6 / steps) for name, cost_us in ranked)


def _wait_lines(events: list[Any], steps: int, waits: Counter[str]) -> tuple[HotLine, ...]:
    """Synchronising calls by line, each with its share of their time by how often it made one."""
    ranges = [event.time_range for event in events if event.name in WAITS]
    total_s = sum(one.end - one.start for one in ranges) * 1e-6 / steps
    calls = sum(waits.values())
    return tuple(
        HotLine(where, "", total_s * count / calls, f"{count} times") for where, count in waits.most_common(10)
    )
