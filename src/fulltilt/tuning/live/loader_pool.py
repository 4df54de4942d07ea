"""Pools of loader workers: copies of the script's DataLoader with other settings, which share one queue of indices.

Private names of torch used here: ``_remove_worker_pids`` and ``_worker_pids_set`` (see `LoaderPool`), an iterator's
``_shutdown_workers``, ``_shutdown`` and ``_workers``, a DataLoader's ``_iterator``, ``_get_iterator`` and
``__multiprocessing_context``. Of multiprocessing: ``process._children``.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import process
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data._utils import signal_handling

from fulltilt.tuning.live.measurement import Knobs
from fulltilt.tuning.trial.throughput import ready_batches

# In the message of an error that the data set raised in a worker.
RAISED_IN_WORKER = "in DataLoader worker process"


def knobs_of(loader: Any) -> Knobs:
    """The script's own settings of a loader."""
    return Knobs(int(loader.num_workers), loader.prefetch_factor or Knobs(0).prefetch_factor, bool(loader.pin_memory))


def sampler_of(loader: Any) -> Any:
    """The sampler that gives the indices of each batch."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def starts_slowly(loader: Any) -> bool:
    """Whether its workers first import the script and torch (spawn), which takes seconds."""
    context = loader.multiprocessing_context
    return (start_method() if context is None else str(context.get_start_method())) != "fork"


def start_method() -> str:
    """How multiprocessing starts processes. Asked by its own function, a script could no longer set it."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def is_of_data_set(error: Exception) -> bool:
    """Whether the data set raised this in a worker; otherwise the pool failed."""
    return RAISED_IN_WORKER in str(error)


def copy_of(loader: Any) -> Any:
    """A copy of a DataLoader, without calling its constructor."""
    copy = object.__new__(DataLoader)
    vars(copy).update(vars(loader))
    return copy


class _PoolSampler:
    """The sampler of a pool's DataLoader: gives it indices from the queue.

    ``owed`` are the indices of batches that the pool has not made yet, the earliest first.
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
    """Makes batches for indices from the queue; without workers, in the training process.

    Workers live as long as the pool; for torch each ``serve`` is a new pass. ``patience_s`` is how long a batch may
    take; None for a pool with the script's own settings, whose errors are the script's and stay as in torch. When a
    worker dies, torch raises in the training thread, wherever that is. Our other pools are taken off that list; their
    dead workers are noticed when a batch is waited for. A pool that only ``repeats`` batches which the script has had
    prints nothing.
    """

    def __init__(
        self,
        loader: Any,
        knobs: Knobs,
        generator: torch.Generator,
        iterate: Callable[[Any], Any],
        metered: Callable[[Callable[[], Any]], Any],
        patience_s: float | None,
        repeats: bool = False,
    ) -> None:
        self.knobs = knobs
        # From a script without workers: it may join, count or end all children that multiprocessing knows.
        self._is_hidden = knobs.num_workers > 0 and not loader.num_workers
        self.is_scripts_own = patience_s is None
        self.on_trial = False
        self.start_s = 0.0  # how long starting the workers held up training
        self.last_taken: Any = None
        self._sampler = _PoolSampler()
        self._metered = metered
        self.iterator: Any = None  # torch's
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
        if knobs.num_workers and (self._is_hidden or repeats):
            first = partial(_begin_worker, loader.worker_init_fn, self._is_hidden, repeats)
            vars(self._loader)["worker_init_fn"] = first
        if knobs.num_workers and not self.is_scripts_own and loader.multiprocessing_context is None:
            # Without a context of its own, the first process would settle the start method for the script.
            context = multiprocessing.get_context(start_method())
            vars(self._loader)["_DataLoader__multiprocessing_context"] = context

    def serve(self, queue: IndexQueue) -> None:
        """Take indices from this queue from now on."""
        self._sampler.owed.clear()
        self._sampler.queue = queue
        if self.iterator is not None:
            self.iterator = self._iterate()
            return
        if not self.is_scripts_own:  # no warning of torch's that they are too many
            vars(self._loader)["check_worker_number_rationality"] = lambda: None
        began_s = time.perf_counter()
        self.iterator = self._metered(self._iterate)
        self.start_s = time.perf_counter() - began_s
        if self.knobs.num_workers and not self.is_scripts_own:
            signal_handling._remove_worker_pids(id(self.iterator))  # type: ignore[attr-defined]
            self.iterator._worker_pids_set = False
        if self.knobs.num_workers:
            _with_workers.add(self)
        if self._is_hidden:
            process._children.difference_update(self.iterator._workers)  # type: ignore[attr-defined]

    @property
    def is_serving(self) -> bool:
        """Whether it takes indices."""
        return self._sampler.queue is not None

    def close(self) -> None:
        """Take no more indices, but make the batches begun."""
        self._sampler.queue = None

    @property
    def owed(self) -> list[Any]:
        """Indices of the batches that it has begun, the earliest first."""
        return list(self._sampler.owed)

    @property
    def ready(self) -> int:
        """How many finished batches are waiting."""
        return ready_batches(self.iterator)

    def draw(self) -> tuple[Any, Any]:
        """The indices of the next batch, and the batch. An error of the data set counts as a batch that was made."""
        try:
            batch = next(self.iterator)
        except Exception as error:
            if self._sampler.owed and (not self.knobs.num_workers or is_of_data_set(error)):
                self.last_taken = self._sampler.owed.popleft()
            raise
        return self._sampler.owed.popleft(), batch

    def retire(self) -> None:
        """End its workers on another thread: joining them takes a moment, and five seconds where one hangs.

        Not when the last reference goes, as torch does: the traceback of an error may keep one. The process waits for
        that thread at its exit, since killed workers leave their folders in /tmp.
        """
        iterator = self._let_go()
        if self.knobs.num_workers and iterator is not None:
            threading.Thread(target=iterator._shutdown_workers, name="fulltilt-retire").start()

    def _let_go(self) -> Any:
        iterator = self.iterator
        self.iterator = self._loader = self._iterate = None  # type: ignore[assignment]
        return iterator


def _begin_worker(init: Callable[[int], None] | None, is_hidden: bool, repeats: bool, worker: int) -> None:
    """First in a worker that is not the script's own.

    Signals to the whole process group reach it, too: the script's handlers may save a checkpoint, which only the
    training process should do. They are not ignored, which programs that the data set starts would inherit. torch
    handles SIGTERM; SIGCHLD is about the worker's own children.
    """
    if repeats:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    for number in signal.valid_signals() - {signal.SIGTERM, signal.SIGCHLD} if is_hidden else ():
        if callable(signal.getsignal(number)):
            signal.signal(number, lambda *_: None)
    if init is not None:
        init(worker)


_with_workers: weakref.WeakSet[LoaderPool] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child has no workers: torch would end those of its parent where it ends."""
    for pool in list(_with_workers):
        if (iterator := pool._let_go()) is not None:
            iterator._shutdown, iterator._workers = True, []
    _with_workers.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register
def _end_at_exit() -> None:
    """End the workers before multiprocessing kills them, which leaves their folders in /tmp.

    torch's exit handler, up to 2.14, waits five seconds for each worker of a loader that pins.
    """
    for pool in list(_with_workers):
        if (iterator := pool._let_go()) is not None:
            iterator._shutdown_workers()


# --------------------------------------------------------------------------- the indices of a pass


class IndexQueue:
    """The rest of a sampler's pass. Indices that a pool took but did not use come back to the front.

    RandomSampler draws one more, unused permutation after its last index. From a generator of the script that is
    deferred to the end of the pass, however far ahead workers have read.
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
        """Put indices back, the earliest first, to be taken next."""
        self._stock.extendleft(reversed(list(batches)))

    def over(self) -> None:
        """The pass has ended for the script."""
        if self._shuffler is not None and self._owes_permutation:
            self._owes_permutation = False
            torch.randperm(len(self._shuffler.data_source), generator=self._shuffler.generator)


def shuffler_of(sampler: Any) -> Any:
    """The sampler that draws the random order, with its ``generator``; None where none does."""
    while sampler is not None and not hasattr(sampler, "generator"):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return sampler
