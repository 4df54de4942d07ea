"""Steps that a job has captured as a CUDA graph: while it captures nothing runs, and each replay is such a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from fulltilt.recorder.patches.exchange import Exchange
from fulltilt.recorder.patches.stepping import Captured, SteppingPatches
from fulltilt.recorder.recorder import Recorder


class GraphPatches:
    """Learns what of a step each graph holds, and marks that at every replay."""

    def __init__(self, torch: Any, recorder: Recorder, stepping: SteppingPatches) -> None:
        self._torch, self._recorder, self._stepping = torch, recorder, stepping
        self._captured: weakref.WeakKeyDictionary[Any, Captured] = weakref.WeakKeyDictionary()

    def install(self, exchange: Exchange) -> None:
        """Stand where a capture begins and ends, and at replays."""
        graphs = self._torch.cuda.CUDAGraph
        exchange.swap(graphs, "capture_begin", self._begin)
        exchange.swap(graphs, "capture_end", self._end)
        exchange.swap(graphs, "replay", self._replay)

    def _begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            if self._recorder.mine():
                self._stepping.capture = Captured()
            return result

        return capture_begin

    def _end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            captured, self._stepping.capture = self._stepping.capture, None
            result = original(graph, *args, **kwargs)
            if captured is not None and captured.holds_steps:
                self._captured[graph] = captured
            return result

        return capture_end

    def _replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            captured = self._captured.get(graph)
            if captured is None:
                return original(graph, *args, **kwargs)
            return self._stepping.replayed(captured, lambda: original(graph, *args, **kwargs))

        return replay
