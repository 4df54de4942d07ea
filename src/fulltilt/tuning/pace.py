"""From where a trial stands after each step to the blocks of steps that say how fast it is.

A loader with w workers gives its batches in bursts of w. So a block ends where a whole number of bursts has passed.
"""

from __future__ import annotations

from collections.abc import Callable

from fulltilt.tuning.interval import is_warm
from fulltilt.tuning.moments import Moment, waited_between

# After so many interruptions without a whole block between them, they are part of the pace of this job.
MOST_FRUITLESS = 4
# A queue is used up within so many times its length, unless the loader is nearly as fast as the training.
USED_UP_WITHIN = 2


class Pace:
    """Cuts a job's steps into blocks. ``marked`` is called with the moments at which one begins or ends."""

    def __init__(self, block_s: float, marked: Callable[[Moment], Moment] = lambda moment: moment) -> None:
        self._block_s = block_s
        self._marked = marked
        self._last: Moment | None = None
        self._began: Moment | None = None
        self._cold_since: Moment | None = None
        self._has_waited = False
        self._fruitless = 0

    def stepped(self, now: Moment) -> tuple[Moment, Moment] | None:
        """Where the block that ends with this step began and ended; None when none ends here."""
        last, self._last = self._last, now
        if last is not None and now.interruptions != last.interruptions and self._fruitless < MOST_FRUITLESS:
            # Validation or a save came between, in which the workers went on: not the pace of training.
            self._fruitless += 1
            self._cold_since, self._began, self._has_waited = now, None, False
            return None
        if last is not None:
            self._has_waited = self._has_waited or waited_between(last, now)
        if self._began is None:
            self._begin_when_warm(now)
            return None
        began = self._began
        assert last is not None
        bursts, before = ((moment.batches - began.batches) // max(now.workers, 1) for moment in (now, last))
        if now.host_s - began.host_s < self._block_s or bursts == before:
            return None
        self._began = self._marked(now)
        if self._fruitless < MOST_FRUITLESS:
            self._fruitless = 0
        return began, self._began

    def _begin_when_warm(self, now: Moment) -> None:
        cold = self._cold_since
        batches = now.batches - (0 if cold is None else cold.batches)
        # Once each worker has been given something to do, one that has nothing to do is ahead of the training.
        is_ahead = batches > now.workers and now.ready > now.queue_batches - now.workers
        most_batches = USED_UP_WITHIN * now.queue_batches if cold is None else now.workers
        if is_warm(now.steps, self._has_waited, is_ahead, batches, most_batches):
            self._began = self._marked(now)
