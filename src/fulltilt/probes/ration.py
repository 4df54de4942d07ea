"""A ration for readings that cost too much to be taken every time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Ration:
    """Lets a costly reading through so seldom that it takes at most ``share`` of the time of one core."""

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self._next_s = float("-inf")

    def due(self) -> bool:
        """Whether the cost of the readings before has been worked off."""
        return self._clock() >= self._next_s

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Charge what happens inside. Time spent waiting counts too: the job may be waiting with us."""
        start_s = self._clock()
        try:
            yield
        finally:
            end_s = self._clock()
            self._next_s = max(self._next_s, end_s) + (end_s - start_s) / self._share
