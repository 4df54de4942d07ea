"""Where several processes meet: collectives that the script calls, and DistributedDataParallel's replicas."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from fulltilt.recorder.marks import Activity
from fulltilt.recorder.patches.exchange import Exchange
from fulltilt.recorder.patches.timed import timed
from fulltilt.recorder.recorder import Recorder

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


class RankPatches:
    """Marks collectives and remembers replicas, which keep timings of their own."""

    def __init__(self, torch: Any, recorder: Recorder) -> None:
        self._torch, self._recorder = torch, recorder

    def install(self, exchange: Exchange) -> None:
        """Stand at the collectives and at DistributedDataParallel's constructor."""
        torch = self._torch
        exchange.swap(torch.nn.parallel.DistributedDataParallel, "__init__", self._replica_init)
        if torch.distributed.is_available():
            for name in COLLECTIVES:
                if hasattr(torch.distributed, name):
                    exchange.swap(torch.distributed, name, self._collective)

    def _collective(self, original: Callable[..., Any]) -> Callable[..., Any]:
        measured = timed(self._recorder, original, Activity.COMM)

        def collective(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if kwargs.get("async_op") else measured(*args, **kwargs)

        return collective

    def _replica_init(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(replica: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(replica, *args, **kwargs)
            if self._recorder.active:
                self._recorder.notes.replicas.append(weakref.ref(replica))
                if replica.device_type == "cpu":
                    # Its default, every 100th step, is right for a GPU, where reading the timers costs a wait.
                    replica._set_ddp_runtime_logging_sample_rate(10)

        return __init__
