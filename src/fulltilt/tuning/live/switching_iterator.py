"""The iterator of one pass over a loader, which can switch from one pool of workers to another.

At most two pools are at work: one that finishes the batches it has begun, and the next, which continues after them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from fulltilt.recorder.dataset_state import AttributeWatch
from fulltilt.tuning.live.loader_check import BatchCheck
from fulltilt.tuning.live.loader_pool import IndexQueue, LoaderPool, is_of_data_set, sampler_of
from fulltilt.tuning.live.measurement import Arrival, Knobs


class Tuner(Protocol):
    """Decides which pool serves; is called at every event of a pass."""

    user: Knobs
    drawn: int

    @property
    def collecting_check(self) -> BatchCheck | None:
        """The check that wants to see the next batch, if any."""

    def at_boundary(self, source: SwitchingIterator) -> None:
        """The script asks for its next batch."""

    def arrived(self, source: SwitchingIterator, arrival: Arrival) -> None:
        """Another batch came."""

    def pass_ended(self, source: SwitchingIterator) -> None:
        """All batches of a pass were given."""

    def make_here(self, source: SwitchingIterator, indices: Any) -> tuple[Any, Any]:
        """A batch, made in the training process."""

    def replace_failed(self, source: SwitchingIterator, pool: LoaderPool, error: Exception) -> LoaderPool:
        """The pool that continues where this one failed."""

    def broke(self, error: Exception) -> None:
        """Tuning itself raised an error."""


class SwitchingIterator:
    """Gives the batches of its pools in order, so that none is lost or overtaken. Runs on the thread that draws."""

    def __init__(self, tuner: Tuner, loader: Any) -> None:
        self.loader = loader
        self.ended = True
        self.watch: AttributeWatch | None = None  # while workers serve a script that has none, or may be exchanged
        self._tuner = tuner
        self._line: deque[LoaderPool] = deque()

    def begin_pass(self, queue: IndexQueue, pool: LoaderPool, at_once: bool) -> None:
        """Begin a pass with this pool: ``at_once``, or when the first batch is asked for."""
        self.ended = False
        self.queue = queue
        for other in self._line:
            if other is not pool:
                other.retire()  # left over from a pass that ended during a switch
        self._line = deque([pool])
        self._left_s: float | None = None
        self._ready = 0
        self._num_yielded = 0  # torch's name: resumable loaders read it
        if at_once:
            try:
                pool.serve(queue)
            except Exception as error:
                self._recover(pool, error)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() answers as it would without us
        return _MultiProcessingDataLoaderIter if self._tuner.user.num_workers else _SingleProcessDataLoaderIter

    def __getattr__(self, name: str) -> Any:  # scripts ask torch's iterator
        line = vars(self).get("_line")
        return getattr(line[0].iterator if line else None, name)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:  # a copy of its loader starts workers of its own
        return type(None), ()

    def __iter__(self) -> SwitchingIterator:
        return self

    def __len__(self) -> int:
        return len(sampler_of(self.loader))

    @property
    def _num_workers(self) -> int:  # torch's name: the loader's timer reads it
        return self._line[0].knobs.num_workers

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        asked_s = time.perf_counter()
        self._let_tune(self._tuner.at_boundary)
        # Not at the first batch of a pass, for which the sampler draws random numbers.
        check = self._tuner.collecting_check if self.is_steady and self._num_yielded else None
        if check is not None:
            self._let_tune(lambda source: check.about_to_fetch(source.loader))
        began_s = time.perf_counter()
        indices, batch = self._draw()
        wait_s = time.perf_counter() - began_s
        self._num_yielded += 1
        self._tuner.drawn += 1
        if check is not None:
            self._let_tune(lambda _: check.fetched(indices, batch))
        before, self._ready = self._ready, self._line[0].ready
        if self._left_s is not None:
            arrival = Arrival(wait_s, asked_s - self._left_s, before - self._ready)
            self._let_tune(lambda source: self._tuner.arrived(source, arrival))
        self._left_s = time.perf_counter()
        return batch

    def _let_tune(self, act: Callable[[SwitchingIterator], None]) -> None:
        """Call the tuner; an error of it must not stop the job."""
        try:
            act(self)
        except Exception as error:
            if os.environ.get("FULLTILT_DEBUG"):
                raise
            self._tuner.broke(error)

    def _draw(self) -> tuple[Any, Any]:
        while True:
            pool, last = self._line[0], self._line[-1]
            if pool is not last and not pool.owed:
                self._line.popleft().retire()
                continue
            try:
                # The pool before has at most one batch left for each worker: its CPUs become idle.
                if not last.is_serving and (pool is last or len(pool.owed) <= pool.knobs.num_workers):
                    last.serve(self.queue)
            except Exception as error:
                self._recover(last, error)
                continue
            try:
                return pool.draw()
            except StopIteration:
                self.ended = True
                self.queue.over()
                self._tuner.pass_ended(self)
                raise
            except Exception as error:
                if (made := self._recover(pool, error)) is not None:
                    return made

    def _recover(self, pool: LoaderPool, error: Exception) -> tuple[Any, Any] | None:
        """After an error of a pool: raise it for the script, make the batch here, or None: another pool continues.

        A script without workers gets the error that its data set raises in the training process.
        """
        made = None
        is_the_scripts = self.queue.failed or pool.is_scripts_own
        if is_the_scripts or is_of_data_set(error):
            if is_the_scripts or self._tuner.user.num_workers:
                try:
                    raise error
                finally:
                    del error  # else its traceback would hold this frame, and so the pool
            # Its traceback would keep this iterator and its workers until a garbage collection, in which torch waits
            # five seconds for each of them.
            error.__traceback__ = None
            try:
                made = self._tuner.make_here(self, pool.last_taken)
            except Exception as own:
                own.__context__ = None  # the error in our worker
                raise
        self._take_back()
        self._line = deque([self._tuner.replace_failed(self, pool, error)])
        return made

    def _take_back(self) -> None:
        """Batches under way will be made anew."""
        self.queue.give_back([indices for other in self._line for indices in other.owed])
        self.retire()

    def replace(self, pool: LoaderPool) -> None:
        """Let another pool continue at once, and make the batches under way anew."""
        self._take_back()
        self._line = deque([pool])

    @property
    def is_steady(self) -> bool:
        """Whether a single pool serves, and no switch is under way."""
        return len(self._line) == 1

    @property
    def pool(self) -> LoaderPool | None:
        """The pool that takes indices from now on."""
        return self._line[-1] if self._line else None

    def hand_over(self, pool: LoaderPool) -> None:
        """Let another pool continue after the batches under way.

        Where the script has workers of its own, it starts now: they do not see what the script changes next.
        """
        self._line[-1].close()
        self._line.append(pool)
        if self._tuner.user.num_workers:
            try:
                pool.serve(self.queue)
            except Exception:  # tried again when the next batch is asked for
                self.queue.give_back(pool.owed)
                pool.close()

    def retire(self) -> None:
        """End all workers."""
        for pool in self._line:
            pool.retire()

    _shutdown_workers = retire  # torch's name
