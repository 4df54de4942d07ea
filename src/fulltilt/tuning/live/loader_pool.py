"""Pools of workers: copies of the script's DataLoader with other settings, fed with index batches from one queue.

Private to torch are ``_remove_worker_pids`` and ``_worker_pids_set`` (see `LoaderPool`), ``_shutdown_workers`` of an
iterator, ``_iterator`` and ``_get_iterator`` of a DataLoader; all else is its public face.
"""

from __future__ import annotations

import atexit
import multiprocessing
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data._utils import signal_handling

from fulltilt.tuning.live.measurement import Knobs
from fulltilt.tuning.trial.throughput import ready_batches

# What torch writes into the message of an error that the data set raised in a worker.
RAISED_IN_WORKER = "in DataLoader worker process"


def knobs_of(loader: Any) -> Knobs:
    """The settings that the script gave its loader."""
    return Knobs(int(loader.num_workers), loader.prefetch_factor or Knobs(0).prefetch_factor, bool(loader.pin_memory))


def sampler_of(loader: Any) -> Any:
    """What gives the indices of one batch after the other."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def starts_slowly(loader: Any) -> bool:
    """Whether its workers import the script and torch before their first batch, which takes seconds."""
    context = loader.multiprocessing_context or multiprocessing
    return str(context.get_start_method()) != "fork"


def is_of_data_set(error: Exception) -> bool:
    """Whether the script's own code raised this in a worker, rather than the pool having failed."""
    return RAISED_IN_WORKER in str(error)


def copy_of(loader: Any) -> Any:
    """A DataLoader with all that this one has, without the constructor's work."""
    copy = object.__new__(DataLoader)
    vars(copy).update(vars(loader))
    return copy


class _PoolSampler:
    """Stands where a pool's DataLoader has its sampler: gives it index batches while there is a queue.

    ``owed`` are those that it took and has not made yet, the earliest first.
    """

    def __init__(self) -> None:
        self.owed: deque[Any] = deque()
        self.queue: IndexQueue | None = None

    def __iter__(self) -> _PoolSampler:
        return self

    def __next__(self) -> Any:
        if self.queue is None:
            raise StopIteration
        self.owed.append(next(self.queue))
        return self.owed[-1]


class LoaderPool:
    """Makes the batches whose indices its feed gives; with no workers, in the training process.

    Workers live until the pool is dropped: each ``serve`` is a new pass to torch. ``patience_s`` is how long a batch
    may take; None for the script's own pool, whose errors are the script's and behave as torch has them. torch raises
    the death of a worker in the training thread wherever that stands: any other pool is taken off that list, and its
    dead workers are found when a batch is waited for.
    """

    def __init__(
        self,
        loader: Any,
        knobs: Knobs,
        generator: torch.Generator,
        iterate: Callable[[Any], Any],
        metered: Callable[[Callable[[], Any]], Any],
        patience_s: float | None,
    ) -> None:
        self.knobs = knobs
        self.is_scripts_own = patience_s is None
        self.on_trial = False
        self.start_s = 0.0  # that starting the workers held up training
        self.last_taken: Any = None
        self._sampler = _PoolSampler()
        self._metered = metered
        self._iterator: Any = None
        self._loader = copy_of(loader)
        self._iterate = partial(iterate, self._loader)
        vars(self._loader).update(
            {"sampler" if loader.batch_sampler is None else "batch_sampler": self._sampler},
            num_workers=knobs.num_workers,
            prefetch_factor=knobs.prefetch_factor if knobs.num_workers else None,
            pin_memory=knobs.pin_memory,
            persistent_workers=knobs.num_workers > 0,
            timeout=(loader.timeout if patience_s is None else patience_s) if knobs.num_workers else 0,
            generator=generator,
            in_order=True,
            _iterator=None,
        )

    def serve(self, queue: IndexQueue) -> None:
        """Take indices from this queue from now on, as many as the workers may have."""
        self._sampler.owed.clear()
        self._sampler.queue = queue
        if self._iterator is not None:
            self._iterator = self._iterate()
            return
        began_s = time.perf_counter()
        with warnings.catch_warnings():
            if not self.is_scripts_own:
                warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            self._iterator = self._metered(self._iterate)
        self.start_s = time.perf_counter() - began_s
        if self.knobs.num_workers and not self.is_scripts_own:
            signal_handling._remove_worker_pids(id(self._iterator))  # type: ignore[attr-defined]
            self._iterator._worker_pids_set = False
        if self.knobs.num_workers:
            # Before multiprocessing kills them, which leaves their folders in /tmp. Up to 2.14, torch's own exit
            # handler waits five seconds for each worker that pins.
            atexit.register(_end_at_exit, weakref.ref(self))

    @property
    def is_serving(self) -> bool:
        """Whether it takes indices."""
        return self._sampler.queue is not None

    def close(self) -> None:
        """Take no more indices, and make what it owes."""
        self._sampler.queue = None

    @property
    def owed(self) -> list[Any]:
        """Indices of the batches that it still owes, the earliest first."""
        return list(self._sampler.owed)

    @property
    def ready(self) -> int:
        """How many batches its workers have made that nobody has taken yet."""
        return ready_batches(self._iterator)

    def draw(self) -> tuple[Any, Any]:
        """The next batch behind its indices. An error of the data set counts as a batch that was made."""
        try:
            batch = next(self._iterator)
        except Exception as error:
            if self._sampler.owed and (not self.knobs.num_workers or is_of_data_set(error)):
                self.last_taken = self._sampler.owed.popleft()
            raise
        return self._sampler.owed.popleft(), batch

    def retire(self) -> None:
        """End its workers beside the training thread: joining them takes a moment, and five seconds where one hangs.

        Not with the last reference, as torch does: the traceback of an error may hold it for good. A job that ends
        meanwhile waits for it: workers that are killed leave their folders in /tmp.
        """
        iterator = self._let_go()
        if self.knobs.num_workers and iterator is not None:
            threading.Thread(target=iterator._shutdown_workers, name="fulltilt-retire").start()

    def _let_go(self) -> Any:
        iterator = self._iterator
        self._iterator = self._loader = self._iterate = None  # type: ignore[assignment]
        return iterator


def _end_at_exit(reference: weakref.ref[LoaderPool]) -> None:
    """As the job ends."""
    pool = reference()
    if pool is not None and (iterator := pool._let_go()) is not None:
        iterator._shutdown_workers()


# --------------------------------------------------------------------------- the index batches of a pass


class IndexQueue:
    """What is left of a sampler's pass. What a pool took and did not make comes back to the front.

    RandomSampler draws one more permutation, for nothing, after its last index: from a generator of the script's own it
    is drawn when the pass ends, however far ahead workers have read.
    """

    def __init__(self, indices: Iterator[Any], sampler: Any = None) -> None:
        self.indices = indices
        self.failed = False  # the sampler has raised an error
        self._stock: deque[Any] = deque()
        shuffler = shuffler_of(sampler)
        self._shuffler = shuffler if isinstance(shuffler, RandomSampler) and shuffler.generator is not None else None
        self._has_begun = self._owes_permutation = False

    def __iter__(self) -> IndexQueue:
        return self

    def __next__(self) -> Any:
        if self._stock:
            return self._stock.popleft()
        generator = self._shuffler.generator if self._shuffler is not None and self._has_begun else None
        before = None if generator is None else generator.get_state()
        self._has_begun = True
        try:
            return next(self.indices)
        except StopIteration:
            raise
        except Exception:
            self.failed = True
            raise
        finally:
            if generator is not None and before is not None and not torch.equal(generator.get_state(), before):
                generator.set_state(before)
                self._owes_permutation = True

    def give_back(self, batches: Iterable[Any]) -> None:
        """Put index batches, the earliest first, before everything else."""
        self._stock.extendleft(reversed(list(batches)))

    def over(self) -> None:
        """The script was told that the pass is over."""
        if self._shuffler is not None and self._owes_permutation:
            self._owes_permutation = False
            torch.randperm(len(self._shuffler.data_source), generator=self._shuffler.generator)


def shuffler_of(sampler: Any) -> Any:
    """What draws the random order behind a loader's sampler, with its ``generator``; None where nothing does."""
    while sampler is not None and not hasattr(sampler, "generator"):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return sampler
