"""Where the host copies to the GPU, and where it waits for it."""

from __future__ import annotations

import functools
import sys
import time
import weakref
from typing import Any

from fulltilt.recorder.hooks import Function, Patches
from fulltilt.recorder.hooks.training import Captured, StepHooks
from fulltilt.recorder.marks import Activity, Point
from fulltilt.recorder.recorder import Recorder
from fulltilt.recorder.stacks.frames import users_line

# Tensor methods for whose result the host waits, and how a user writes them.
READS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "cpu": ".cpu()",
    "nonzero": ".nonzero()",
    "__bool__": "bool()",
    "__float__": "float()",
    "__int__": "int()",
}
ASK_PINNED_FIRST = 8
ASK_PINNED_EVERY = 64
# A copy that took the host longer than this was not only queued.
BLOCKED_S = 0.0002
LARGE_COPY_BYTES = 1 << 20


def _kept_by_torchvision() -> bool:
    """torchvision keeps a set of Tensor's methods from its import on: they must be neither replaced nor put back."""
    return "torchvision.tv_tensors" in sys.modules


class DeviceHooks:
    """Marks copies to the GPU and calls that wait for it."""

    def __init__(self, torch: Any, recorder: Recorder) -> None:
        self._torch = torch
        self._recorder = recorder
        self._state = recorder.state
        self._copies_seen = 0
        self._patches: Patches | None = None
        self._on_gpu = False
        self.watches_copies = False

    def install(self, patches: Patches) -> None:
        """Patch the tensor methods that copy, synchronize, and where a GPU trains the methods that wait."""
        torch = self._torch
        self._patches = patches
        self.watches_copies = not _kept_by_torchvision()
        if self.watches_copies:
            for name in ("to", "cuda"):
                patches.swap(torch.Tensor, name, self._copy, unless=_kept_by_torchvision)
        patches.swap(torch.cuda, "synchronize", functools.partial(self._wait, "torch.cuda.synchronize()"))
        if self._on_gpu:
            self._watch_reads(patches)

    def trains_on_gpu(self) -> None:
        """The job trains on a GPU: patch the methods that wait for it.

        Not before: a warning of torch's inside float(loss) would name our file as the caller.
        """
        if not self._on_gpu and self._patches is not None:
            self._on_gpu = True
            self._watch_reads(self._patches)

    def _watch_reads(self, patches: Patches) -> None:
        for name, written in READS.items():
            patches.swap(self._torch.Tensor, name, functools.partial(self._wait, written))

    def _copy(self, original: Function) -> Function:
        recorder, copies, torch = self._recorder, self._state.copies, self._torch

        def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.clock is None or recorder.bursts.paused or torch.compiler.is_compiling():
                return original(tensor, *args, **kwargs)
            if tensor.is_cuda or not recorder.on_training_thread() or recorder.activity is not Activity.USER:
                return original(tensor, *args, **kwargs)
            before = recorder.switch(Activity.TRANSFER)
            began = time.perf_counter()
            moved = False
            try:
                result = original(tensor, *args, **kwargs)
                moved = bool(result.is_cuda)
                return result
            finally:
                took = time.perf_counter() - began
                worth_an_event = moved and (took > BLOCKED_S or tensor.nbytes >= LARGE_COPY_BYTES)
                recorder.switch(before, None, Point.TRANSFER if worth_an_event else Point.NONE)
                if moved:
                    blocking = not (kwargs.get("non_blocking") or (len(args) > 1 and args[1] is True))
                    copies.add(tensor.nbytes, blocking, recorder.bursts.weight)
                    self._copies_seen += 1
                    if self._copies_seen <= ASK_PINNED_FIRST or self._copies_seen % ASK_PINNED_EVERY == 0:
                        copies.asked += 1
                        copies.pageable += not tensor.is_pinned()
                    if worth_an_event:
                        copies.lines.charge(*users_line(recorder.loop_frames.spots), took)
                    if recorder.calibration.under_way and took > BLOCKED_S:
                        recorder.lost_its_lead()

        return copy

    def _wait(self, written: str, original: Function) -> Function:
        """``original``, which waits for the GPU; a tensor method does so only for a tensor on the GPU."""
        recorder, state, torch = self._recorder, self._state, self._torch

        def wait(*args: Any, **kwargs: Any) -> Any:
            if recorder.clock is None or recorder.bursts.paused or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            of_the_host = args and not getattr(args[0], "is_cuda", True)
            if of_the_host or not recorder.on_training_thread() or recorder.activity is Activity.SYNC:
                return original(*args, **kwargs)
            point = Point.SYNCED if recorder.calibration.under_way else Point.NONE
            before = recorder.switch(Activity.SYNC, None, point)
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                recorder.switch(before)
                took = time.perf_counter() - began
                if before is not Activity.CHECKPOINT:
                    line = users_line(recorder.loop_frames.spots)
                    state.waited_for_gpu(*line, written, took, recorder.bursts.weight)
                if recorder.calibration.under_way:
                    recorder.lost_its_lead()

        return wait


class GraphHooks:
    """Learns which parts of a step each graph holds, and marks them at every replay."""

    def __init__(self, torch: Any, recorder: Recorder, stepping: StepHooks) -> None:
        self._torch, self._recorder, self._stepping = torch, recorder, stepping
        self._captured: weakref.WeakKeyDictionary[Any, Captured] = weakref.WeakKeyDictionary()

    def install(self, patches: Patches) -> None:
        """Patch the begin and end of captures, and replays."""
        graphs = self._torch.cuda.CUDAGraph
        patches.around(graphs, "capture_begin", self._begin)
        patches.around(graphs, "capture_end", self._end)
        patches.swap(graphs, "replay", self._replay)

    def _begin(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._recorder.state.uses_cuda_graphs = True
        if self._recorder.on_training_thread():
            self._stepping.capture = Captured()
        return result

    def _end(self, original: Function, graph: Any, *args: Any, **kwargs: Any) -> Any:
        captured, self._stepping.capture = self._stepping.capture, None
        result = original(graph, *args, **kwargs)
        if captured is not None and (captured.backwards or captured.optimizers):
            self._captured[graph] = captured
        return result

    def _replay(self, original: Function) -> Function:
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            captured = self._captured.get(graph)
            if captured is None:
                return original(graph, *args, **kwargs)
            return self._stepping.replayed(captured, lambda: original(graph, *args, **kwargs))

        return replay
