"""torch.compile: how long it compiles, how often again, and why."""

from __future__ import annotations

import sys
import time
from typing import Any

from fulltilt.recorder.hooks import Function, Patches
from fulltilt.recorder.marks import Activity
from fulltilt.recorder.recorder import Recorder
from fulltilt.recorder.stacks.frames import users_line
from fulltilt.recorder.user_code import shown_path
from fulltilt.records import CompileRecord, HotLine

MOST_LINES = 10


class CompileHooks:
    """Marks compiling, by the callbacks that dynamo runs around each compilation."""

    def __init__(self, torch: Any, recorder: Recorder) -> None:
        self._torch, self._recorder = torch, recorder
        self._patches: Patches | None = None
        self._before: Activity | None = None
        self._began_ns = 0
        self._seconds = 0.0
        self._where = ""

    def install(self, patches: Patches) -> None:
        """Wait for the first torch.compile: importing dynamo takes seconds, and most jobs never need it."""
        self._patches = patches
        patches.around(self._torch, "compile", self._compile)
        self._recorder.state.compiling = self.record

    def _compile(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        self._where, _ = users_line()
        result = original(*args, **kwargs)
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "CompilationCallbackHandler", None)
        if handler is not None and self._patches is not None:
            # Not as callbacks of our own: torch._dynamo.reset() forgets those.
            self._patches.around(handler, "run_start_callbacks", self._begin)
            self._patches.around(handler, "run_end_callbacks", self._end)
            self._patches = None
        return result

    def _begin(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        self._began_ns = time.perf_counter_ns()
        if self._recorder.on_training_thread():
            self._recorder.resume()
            self._before = self._recorder.switch(Activity.COMPILE)
        return original(*args, **kwargs)

    def _end(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        self._seconds += (time.perf_counter_ns() - self._began_ns) * 1e-9
        if self._before is not None and self._recorder.on_training_thread():
            self._recorder.switch(self._before)
            self._before = None
        return original(*args, **kwargs)

    def record(self) -> CompileRecord | None:
        """What dynamo has counted so far; None where nothing was compiled."""
        dynamo: Any = sys.modules.get("torch._dynamo.utils")
        if dynamo is None or not self._seconds:
            return None
        again: dict[tuple[str, str], tuple[float, int, str]] = {}
        forwards: dict[str | None, tuple[str, str]] = {}
        compiles = 0
        for metrics in list(dynamo.get_compilation_metrics()):
            took_s = 1e-6 * (metrics.duration_us or 0)
            reason = getattr(metrics, "recompile_reason", None)
            if metrics.is_forward is False:  # of the forward with the same number, when it is first needed
                if (spot := forwards.get(metrics.compile_id)) is not None:
                    seconds, times, words = again[spot]
                    again[spot] = seconds + took_s, times, words
                continue
            compiles += 1
            if reason:
                spot = f"{shown_path(metrics.co_filename)}:{metrics.co_firstlineno}", metrics.co_name
                if "/torch/" in metrics.co_filename and self._where:  # a module of torch's own
                    spot = self._where, "torch.compile"
                forwards[metrics.compile_id] = spot
                seconds, times, _ = again.get(spot, (0.0, 0, ""))
                # "0/1: tensor 'x' size mismatch at index 0. expected 3, actual 4" and then a stack.
                words = " ".join(reason.splitlines()[0].split("#")[0].split(": ", 1)[-1].split())
                again[spot] = seconds + took_s, times + 1, words
        lines = sorted(again.items(), key=lambda item: -item[1][0])[:MOST_LINES]
        breaks = dict(dynamo.counters.get("graph_break", {}))
        return CompileRecord(
            compiles=compiles,
            seconds=self._seconds,
            recompiles=sum(times for _, times, _ in again.values()),
            recompile_lines=tuple(
                HotLine(where, function, seconds, f"{times} times: {words}")
                for (where, function), (seconds, times, words) in lines
            ),
            graph_breaks=sum(breaks.values()),
            break_reasons=tuple(reason.splitlines()[0] for reason in list(breaks)[:MOST_LINES] if reason),
        )
