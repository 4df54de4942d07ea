"""A thread that reads the probes at an interval and hands each sample on. It never takes the job down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.records import Sample


class Sampler:
    """Hands a ``Sample`` to ``sink`` every ``interval_s``. Failures are remembered in ``problems``, never raised."""

    def __init__(
        self,
        sink: Callable[[Sample], None],
        *,
        gpus: Gpus | None = None,
        host: HostProbe | None = None,
        interval_s: float = 1.0,
        t0: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problems: list[str] = []
        self._sink = sink
        self._gpus = gpus or Gpus.open()
        self._host = host or HostProbe()
        self._interval_s = interval_s
        self._clock = clock
        self._t0 = clock() if t0 is None else t0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin sampling; the first sample is taken at once."""

    def stop(self) -> None:
        """End sampling and wait a short while for the thread."""

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
