"""A rate limit for expensive readings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RateLimit:
    """Limits expensive readings to ``share`` of the time of one core.

    ``credit_s`` may be spent at once, at the start or after some time without readings.
    """

    def __init__(self, share: float, credit_s: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._credit_s = credit_s
        self._clock = clock
        self._left_s = credit_s  # negative: a debt that time pays off
        self._at_s = clock()

    def due(self) -> bool:
        """Whether another reading is allowed now."""
        now_s = self._clock()
        self._left_s = min(self._credit_s, self._left_s + self._share * (now_s - self._at_s))
        self._at_s = now_s
        return self._left_s >= 0

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Charge the time spent inside, including waits, in which the job may be waiting as well."""
        start_s = self._clock()
        try:
            yield
        finally:
            self.charge(self._clock() - start_s)

    def charge(self, cost_s: float) -> None:
        """Charge ``cost_s`` for a reading."""
        self._left_s -= cost_s
