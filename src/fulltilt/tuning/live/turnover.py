"""What beginning a pass costs: workers that end with each pass are started anew for the next."""

from __future__ import annotations

import time
from collections.abc import Callable

from fulltilt.tuning.live.limits import Limits

# Workers that persist must make beginning a pass this much cheaper, or they are not kept.
CHEAPER = 0.8


class Turnover:
    """Times the beginnings of passes."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.perf_counter) -> None:
        self._limits = limits
        self._clock = clock
        self._began_s = clock()
        self._cost_s = 0.0
        self._restarted_s: float | None = None
        self._own_passes = 0
        self._refused = False

    def began(self, took_s: float) -> None:
        """A pass has begun, which took so long."""
        self._began_s = self._clock() - took_s
        self._cost_s = took_s

    def first_batch(self, wait_s: float) -> None:
        """The first batch has come."""
        self._cost_s += wait_s

    @property
    def share(self) -> float:
        """The part of this pass that its beginning took, up to now."""
        return self._cost_s / max(self._clock() - self._began_s, 1e-9)

    def should_persist(self, persistent: bool) -> bool:
        """At the end of a pass: whether workers should live on to the next."""
        if self._refused:
            return False
        if not persistent:
            self._restarted_s = self._cost_s
            return self.share >= self._limits.turnover_share
        self._own_passes += 1
        if self._own_passes > 1 and self._restarted_s is not None:  # the first had to start them
            self._refused = self._cost_s > CHEAPER * self._restarted_s
        return not self._refused
