"""One pass over a loader, drawn from one pool of workers after another: the source behind the loader's tap."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fulltilt.tuning.live.orders import Orders
from fulltilt.tuning.live.pools import Pool
from fulltilt.tuning.live.window import Arrival


class Conductor(Protocol):
    """Who decides which pools run, told by the relay what happens to the batches."""

    def at_boundary(self, relay: Relay) -> None:
        """The script asks for a batch: the moment to hand over."""

    def arrived(self, relay: Relay, arrival: Arrival) -> None:
        """Another batch came."""

    def ran_dry(self, pool: Pool) -> None:
        """A pool has given its last batch and another goes on."""

    def failed_at_work(self, relay: Relay, error: Exception) -> None:
        """A pool broke: another has to be put in its place."""

    def broke(self, error: Exception) -> None:
        """The conductor itself went wrong."""


class Host(Protocol):
    """Whose passes they are, told how each one begins and ends."""

    def first_arrived(self, wait_s: float) -> None:
        """The first batch of a pass came."""

    def pass_ended(self, relay: Relay) -> None:
        """All batches of a pass were given."""

    def pass_abandoned(self, relay: Relay) -> None:
        """A pass was left early, and its iterator is gone."""

    def passes_overlap(self) -> None:
        """A pass goes on although another one has begun since."""

    def newest(self) -> Iterator[Any]:
        """The source of the pass that began last."""


class Relay:
    """Hands out the batches of the pools in its line, the first one's to the last, so that none is lost or overtaken.

    A pool that is handed over to takes the orders behind those of the pool before it, which runs dry meanwhile. As
    that one's workers have less to do, those of the next get more.
    """

    def __init__(self, host: Host, conductor: Conductor, orders: Orders, first: Pool, loader: Any) -> None:
        self.orders = orders
        self._line: deque[Pool] = deque([first])
        self.ended = False
        self.overtaken = False  # another pass over this loader has begun since
        self.is_followed = False  # where workers persist, torch has one iterator for all passes: the next goes on
        self._host = host
        self._conductor = conductor
        self._loader = loader  # scripts loop over loaders that nobody else holds
        self._num_workers = first.knobs.workers
        self._num_yielded = 0  # torch's name: loaders that can be resumed read it, and pools count from their own first
        self._left_s: float | None = None
        self._ready = 0

    def __iter__(self) -> Relay:
        return self

    def __len__(self) -> int:
        return len(self._loader._index_sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line[0].iterator, name)

    def __next__(self) -> Any:
        if self.is_followed:
            return next(self._host.newest())
        if self.ended:
            raise StopIteration  # its pools may serve another pass by now
        asked_s = time.perf_counter()
        if self.overtaken:
            self.overtaken = False
            self._host.passes_overlap()
        self.orders.asked()
        if self._left_s is None and self.is_steady:  # the first batch may have been an error, and been handed over
            self._line[0].open()
        self._let_conduct(self._conductor.at_boundary)
        began_s = time.perf_counter()
        batch = self._draw()
        self._num_yielded += 1
        self.orders.given()
        wait_s = time.perf_counter() - began_s
        before, self._ready = self._ready, self._line[0].ready
        if self._left_s is None:
            self._host.first_arrived(wait_s)
        else:
            self._let_conduct(self._conductor.arrived, Arrival(wait_s, asked_s - self._left_s, before - self._ready))
        self._left_s = time.perf_counter()
        return batch

    def _let_conduct(self, act: Callable[..., None], *facts: Any) -> None:
        """Tuning may go wrong; the job goes on."""
        try:
            act(self, *facts)
        except Exception as error:
            if os.environ.get("FULLTILT_DEBUG"):
                raise
            self._conductor.broke(error)

    def _draw(self) -> Any:
        while True:
            if len(self._line) > 1:
                if self._line[0].dry:
                    self._step_on()
                else:
                    self._line[-1].open_behind(self._line[-2])
            try:
                return self._line[0].draw()
            except StopIteration:
                if len(self._line) == 1:
                    self.ended = True
                    self.orders.over()
                    self._host.pass_ended(self)
                    raise
                self._step_on()
            except Exception as error:
                if self._line[0].final:
                    self.orders.given()  # also before an error, workers are sent the next order
                    raise
                self._conductor.failed_at_work(self, error)

    def _step_on(self) -> None:
        before = self._line.popleft()
        self._num_workers = self._line[0].knobs.workers
        if self.is_steady:
            self._line[0].open()
        self._conductor.ran_dry(before)

    @property
    def serving(self) -> Pool:
        """The pool from which the next batch comes."""
        return self._line[0]

    @property
    def pools(self) -> tuple[Pool, ...]:
        """All pools in its line."""
        return tuple(self._line)

    @property
    def is_steady(self) -> bool:
        """Whether one pool alone serves, and no hand-over is under way."""
        return len(self._line) == 1

    def hand_over(self, pool: Pool) -> None:
        """Let another pool go on behind the batches that are under way."""
        self._line[-1].close()
        if not pool.has_joined(self.orders):
            pool.join(self.orders)
        pool.open_behind(self._line[-1])
        self._line.append(pool)

    def replace_serving(self, pool: Pool) -> None:
        """Put another pool in the place of the one that serves, to make first what that one still owed."""
        owed = self._line.popleft().unfulfilled()
        if not pool.has_joined(self.orders):
            pool.join(self.orders)
        if self._line:
            pool.mend(owed)
        else:
            self.orders.give_back(owed)
            pool.open()
        self._line.appendleft(pool)
        self._num_workers = pool.knobs.workers

    def start_over(self, pool: Pool) -> None:
        """Between two batches: put a pool in the place of all others, to make first what they still owed."""
        owed: list[Any] = []
        for other in self._line:
            other.forget_fulfilled()
            owed += other.unfulfilled()
        self.orders.give_back(owed)
        self._line = deque([pool])
        pool.join(self.orders)
        pool.open()
        self._num_workers = pool.knobs.workers

    def __del__(self) -> None:
        if not self.ended:
            self._host.pass_abandoned(self)
