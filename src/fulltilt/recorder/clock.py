"""The GPU's position on the host's clock, read from CUDA events without ever making the training thread wait.

Events are recorded at boundaries and read later. The times of successive events are added up from one calibrated
reference; since two clocks drift, every sum is held between what is certain: the GPU cannot reach an event before the
host recorded it, nor after the host has seen it reached.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any


class CudaClock:
    """Records events of the current stream on the training thread, and resolves them on the observer's."""

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._capturing = torch.cuda.is_current_stream_capturing
        self._pool: deque[Any] = deque()
        self._last: Any = None
        self._last_ns = 0.0
        self._cycles_per_s = 1.9e9  # of today's GPUs; a slower one only waits a little longer
        # The one deliberate wait: with an empty queue, host and GPU stand at the same moment.
        self._cuda.synchronize()
        reference = self._cuda.Event(enable_timing=True)
        reference.record()
        reference.synchronize()
        self._last, self._last_ns = reference, float(time.perf_counter_ns())

    def record(self) -> Any:
        """An event at the current end of the current stream. Safe, and None, while a CUDA graph is captured."""
        if self._capturing():
            return None
        try:
            event = self._pool.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def delay(self, seconds: float) -> None:
        """Keep the GPU busy for about ``seconds`` with a kernel that only counts cycles: the host gets a lead."""
        if not self._capturing():
            self._cuda._sleep(int(seconds * self._cycles_per_s))

    def resolve(self, event: Any, recorded_ns: int) -> float | None:
        """When the GPU reached ``event``, in host nanoseconds; None when it has not yet. Events come in their order."""
        if not event.query():
            return None
        seen_ns = float(time.perf_counter_ns())
        reached = self._last_ns + float(self._last.elapsed_time(event)) * 1e6
        reached = min(max(reached, float(recorded_ns)), seen_ns)
        self._pool.append(self._last)
        self._last, self._last_ns = event, reached
        return reached
