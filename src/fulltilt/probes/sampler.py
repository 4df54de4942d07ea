"""A thread that reads the probes at an interval and hands each sample on. It never crashes the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.records import HostReading, Sample

# A driver that hangs must not keep the job from ending.
_STOP_TIMEOUT_S = 2.0

Answer = TypeVar("Answer")


class Sampler:
    """Hands a ``Sample`` to ``sink`` every ``interval_s``, the first at once and the last when it is stopped.

    Errors in a probe or in the sink are not raised: that part of the sample stays empty.
    """

    def __init__(
        self,
        sink: Callable[[Sample], None],
        *,
        gpus: Gpus,
        host: HostProbe | None = None,
        interval_s: float = 1.0,
        t0: float | None = None,
    ) -> None:
        if interval_s <= 0:
            raise ValueError(f"interval_s must be positive, not {interval_s}")
        self._sink = sink
        self._gpus = gpus
        self._host = host
        self._interval_s = interval_s
        self._t0 = time.monotonic() if t0 is None else t0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin sampling. A second call does nothing."""
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="fulltilt-sampler", daemon=True)
            self._thread.start()

    def stop(self) -> bool:
        """Take the last sample and stop; returns whether the thread ended within two seconds (a driver may hang)."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._stopped.set()
        thread.join(_STOP_TIMEOUT_S)
        return not thread.is_alive()

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        host = self._host or _guarded(HostProbe, None)
        self._take(host)
        ended = False
        while not ended:
            ended = self._stopped.wait(self._interval_s)
            self._take(host)

    def _take(self, host: HostProbe | None) -> None:
        t_s = time.monotonic() - self._t0
        reading = HostReading() if host is None else _guarded(host.read, HostReading())
        sample = Sample(t_s=t_s, host=reading, gpus=_guarded(self._gpus.read, ()))
        _guarded(lambda: self._sink(sample), None)


def _guarded(call: Callable[[], Answer], otherwise: Answer) -> Answer:
    try:
        return call()
    except Exception:  # the job that we watch comes first
        return otherwise
