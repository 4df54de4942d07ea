"""Checks whether a loader may be tuned: whether other workers would make the same batches. If not, it says why.

First by the parts of the loader; then two workers make batches again that the script has had, three times each. Where
those differ among each other, the data set draws random numbers; where they agree but differ from the script's, it
behaves differently in a worker. Only generators that torch seeds anew in each worker may be drawn from in a script
without workers: copies of another one, or of an unseen state, repeat themselves. What only a few samples do is found
later: a worker that serves such a script refuses a batch that changed its data set.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils import signal_handling

from fulltilt.recorder.dataset_state import AttributeWatch, Pickled, global_generators, mark_of
from fulltilt.tuning.live.loader_pool import IndexQueue, LoaderPool, copy_of, start_method

# Several, since results that depend on the number of threads agree now and then.
MOST_BATCHES = 3
CHECKING_WORKERS = 2
TIMES = 3
DRAWS = "its data set draws random numbers, which would differ in other workers (--exact)"
OWN_DRAWS = "its data set draws from a random generator of its own, of which each worker would have the same copy"
UNKNOWN_DRAWS = "its batches come out different each time, though no random generator that is known is drawn from"


def short(error: Exception) -> str:
    """The last line of an error's message, without the worker's traceback before it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")


class BatchCheck:
    """Collects batches of the script, then has workers make them again.

    ``verdict`` is SAME, RANDOM, or why to leave the loader alone. ``serial``: the training process makes the batches
    itself; then its random generators, open files and the state of its data set are compared around each batch, too.
    """

    SAME, RANDOM = "same", "random"

    def __init__(self, serial: bool) -> None:
        self.verdict: str | None = None
        self.tensors_per_batch = 0
        self.draws_from_torch = False  # from torch's global generator, which may also shuffle
        self.draws_from_own = False  # from a generator that the data set holds, which it may seed for each sample
        self.thread: threading.Thread | None = None  # compares what workers make
        self._serial = serial
        self._wanted: list[tuple[Any, bytes]] = []
        self._is_random = False
        self._before: tuple[list[Any], list[Any], dict[tuple[int, str], int], int] | None = None
        self._state: bytes | None = None

    @property
    def is_collecting(self) -> bool:
        """Whether more batches are wanted."""
        return self.thread is None and self.verdict is None and len(self._wanted) < MOST_BATCHES

    @property
    def may_begin(self) -> bool:
        """Whether there is a batch to compare, and no comparison has begun."""
        return self.thread is None and self.verdict is None and bool(self._wanted)

    def begin_pass(self) -> None:
        """Start over: the script may have changed its data set between two passes."""
        if self.thread is None:
            self._wanted, self._state = [], None

    def about_to_fetch(self, loader: Any) -> None:
        """Called before the script's next batch is made."""
        if self._serial:
            # First: to look at the attributes of a BytesIO gives it a place for them, which is pickled, too.
            known, own = global_generators(), AttributeWatch((loader.dataset, loader.collate_fn)).generators
            if self._state is None:
                self._look_at_data_set(loader)
            marks, own_marks = ([(one, mark_of(one)) for one in each] for each in (known, own))
            self._before = (marks, own_marks, file_positions(), bytes_written())

    def fetched(self, indices: Any, batch: Any) -> None:
        """Called with that batch: keeps its digest, since training may change the batch in place."""
        if self._before is not None:
            written = bytes_written()
            generators, own, positions, written_before = self._before
            drawn = [mark_of(one) != before for one, before in generators]
            self._is_random = self._is_random or any(drawn)
            self.draws_from_torch = self.draws_from_torch or drawn[0]
            if any(mark_of(one) != before for one, before in own):
                self.draws_from_own = True
            now = file_positions()
            if any(now.get(file, position) != position for file, position in positions.items()):
                self.verdict = "its data set reads from an open file whose position workers would share"
            if written > written_before:
                self.verdict = "its data set writes files while it makes a batch, and workers would write at once"
        pickled = Pickled(batch)
        problem = pickled.problem or pickled.unusual
        if problem is not None:
            self.verdict = f"a worker cannot send its batches ({problem})"
        self.tensors_per_batch = max(self.tensors_per_batch, pickled.tensors)
        self._wanted.append((copy.deepcopy(indices), pickled.digest))

    def _look_at_data_set(self, loader: Any) -> None:
        pickled = Pickled((loader.dataset, loader.collate_fn), is_batch=False)
        if pickled.problem is not None:
            self.verdict = f"its data set holds what a worker cannot share ({pickled.problem})"
        elif self._state is not None and pickled.digest != self._state:
            self.verdict = (
                "what its data set holds changes as it is read, and workers would not see each other's changes"
            )
        self._state = pickled.digest

    def begin(self, loader: Any, make: Callable[[int], LoaderPool]) -> None:
        """Have workers make the batches again, while training goes on."""
        if self._serial:
            self._look_at_data_set(loader)
        if (shared := AttributeWatch((loader.dataset, loader.collate_fn)).shared) is not None:
            self.verdict = f"its data set shares a {shared} with other processes, which a batch made again may change"
        if self.verdict is None:
            try:
                pool = make(CHECKING_WORKERS)
                pool.serve(IndexQueue(iter([indices for indices, _ in self._wanted for _ in range(TIMES)])))
            except Exception as error:
                self.verdict = f"workers cannot be started ({short(error)})"
                return
            self.thread = threading.Thread(target=self._compare, args=(pool,), name="fulltilt-check", daemon=True)
            self.thread.start()

    def _compare(self, pool: LoaderPool) -> None:
        found = self.SAME
        try:
            for _, wanted in self._wanted:
                first, *others = [Pickled(pool.draw()[1]).digest for _ in range(TIMES)]
                if any(other != first for other in others):
                    if self._serial and (self.draws_from_own or not self._is_random):
                        self.verdict = OWN_DRAWS if self.draws_from_own else UNKNOWN_DRAWS
                        break
                    self._is_random = True
                elif wanted != first:
                    found = "its batches come out different in a worker"
        except Exception as error:
            error.__traceback__ = error.__cause__ = error.__context__ = None  # they would hold the pool
            found, self._is_random = reason_in(error) or f"a worker cannot make its batches ({short(error)})", False
        pool.retire()
        self.verdict = self.verdict or (self.RANDOM if self._is_random else found)


# ---------------------------------------------------------------------- within a worker


class UnfitForWorkersError(Exception):
    """Raised in a worker: why its loader is to be left alone."""


def reason_in(error: Exception) -> str | None:
    """Why a worker refused a batch; None for all other errors. torch puts a traceback before it."""
    if not isinstance(error, UnfitForWorkersError):
        return None
    return str(error).strip().splitlines()[-1].partition(": ")[2]


def refusing(loader: Any, exact: bool, may_draw_from_own: bool) -> Any:
    """A copy of a loader whose workers refuse a batch that changed their data set.

    They also refuse one for which they drew from a generator of the data set's own, or with ``exact`` from any.
    """
    watch = _WorkerWatch(loader.collate_fn, loader.worker_init_fn, exact, may_draw_from_own)
    copy = copy_of(loader)
    vars(copy).update(collate_fn=watch.collate, worker_init_fn=watch.begin)
    return copy


class _WorkerWatch:
    """Stands for ``collate_fn`` and ``worker_init_fn``: what comes last and first in a worker."""

    def __init__(
        self, collate: Callable[[Any], Any], init: Callable[[int], None] | None, exact: bool, may_draw_from_own: bool
    ) -> None:
        self._collate, self._init, self._exact, self._may_draw_from_own = collate, init, exact, may_draw_from_own

    def begin(self, worker: int) -> None:
        """Called in a worker before its first batch."""
        if self._init is not None:
            self._init(worker)
        self._attributes = AttributeWatch((getattr(get_worker_info(), "dataset", None), self._collate))
        generators = global_generators() if self._exact else []
        if self._exact or not self._may_draw_from_own:
            generators += self._attributes.generators
        self._generators = [(generator, mark_of(generator)) for generator in generators]

    def collate(self, samples: Any) -> Any:
        """The batch; raises UnfitForWorkersError where more was done than to make it."""
        batch = self._collate(samples)
        if (name := self._attributes.changed()) is not None:
            raise UnfitForWorkersError(
                f"its data set changes while it makes a batch ({name}), which workers would keep to themselves"
            )
        if any(mark_of(generator) != before for generator, before in self._generators):
            raise UnfitForWorkersError(DRAWS if self._exact else OWN_DRAWS)
        return batch


# ---------------------------------------------------------------------- files

# System files, and those in which JIT compilers (oneDNN) list their code for `perf`.
NO_DATA = ("/proc/", "/sys/", "/tmp/perf-")


def file_positions() -> dict[tuple[int, str], int]:
    """The position of each file that this process has open for reading: forked workers would share it.

    Not of files that are only written: logs and Fulltilt's record grow during a fetch, too.
    """
    to_read = (file for file in psutil.Process().open_files() if file.mode in ("r", "r+"))
    return {(file.fd, file.path): file.position for file in to_read if not file.path.startswith(NO_DATA)}


def bytes_written() -> int:
    """What this thread has written to files on a disk so far, in whole pages; 0 where that is not known.

    What goes into sockets does not count: a data set may well ask a server.
    """
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/thread-self/io").read_text(encoding="ascii").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("write_bytes:")))
    return 0


# ---------------------------------------------------------------------- the parts of a loader

# These fix their whole order when the first index is drawn.
FIXED_AT_ONCE = (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
# Accelerate's wrappers, and the attribute with the sampler inside.
WRAPPERS = {"BatchSamplerShard": "batch_sampler", "SkipBatchSampler": "batch_sampler"}
OVER_A_SEQUENCE: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


def reason_against(loader: Any) -> str | None:
    """Why this loader cannot be tuned, by its class and parts; None where it can."""
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        return f"its class {kind.__name__} overrides how a DataLoader iterates"
    if isinstance(loader.dataset, IterableDataset):
        return (
            "an IterableDataset decides for each worker what it gives, so another number may change the batches; "
            "fulltilt tune tries other numbers in runs of their own"
        )
    if isinstance(loader.dataset, MapDataPipe):
        return "a DataPipe keeps state in each worker"
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        return "its batches come in no fixed order (in_order=False)"
    if torch.get_default_device().type != "cpu":
        return f"torch draws the seeds of workers on the default device, which is {torch.get_default_device()}"
    if loader.num_workers:
        return None
    # A loader without workers cannot always be given some.
    if (method := start_method()) != "fork":
        return f"workers would start by {method}, which runs the top level of the script again"
    if multiprocessing.current_process().daemon:
        return "this process may not start processes of its own (it is a daemon)"
    # torch's own handler is put around the script's where another loader has workers already.
    handler = signal.getsignal(signal.SIGCHLD)
    if not signal_handling._SIGCHLD_handler_set and handler not in (signal.SIG_DFL, None):
        return "the script handles the end of child processes itself (SIGCHLD), and would find workers among them"
    return reason_of_thread(loader)


def reason_of_thread(loader: Any) -> str | None:
    """Why this thread, which draws a batch, may not start the first workers; None where it may."""
    if loader.num_workers or threading.current_thread() is threading.main_thread():
        return None
    return "a thread of the script draws its batches; forking from a thread may deadlock"


def reason_of_sampler(sampler: Any, iterator: Any) -> str | None:
    """Why a sampler may not be read further ahead; None where it may. ``iterator`` is the one of the pass under way."""
    kind = type(sampler)
    if isinstance(sampler, list):
        return "its sampler is a list, which the script may change during the pass"
    if isinstance(iterator, OVER_A_SEQUENCE) or any(kind.__iter__ is known.__iter__ for known in FIXED_AT_ONCE):
        return None
    if isinstance(sampler, RandomSampler) and (kind.__iter__ is RandomSampler.__iter__ or _of_accelerate(kind)):
        # Later permutations of a pass would be drawn from the script's own generator when they are needed.
        later = sampler.replacement or sampler.num_samples > len(sampler.data_source)
        if sampler.generator is not None and later:
            return "its RandomSampler draws from the script's own generator during the pass"
        return None
    if kind.__iter__ is BatchSampler.__iter__:
        inner = getattr(iterator, "gi_frame", None)
        return reason_of_sampler(sampler.sampler, inner and inner.f_locals.get("sampler_iter"))
    if _of_accelerate(kind) and kind.__name__ in WRAPPERS:
        return reason_of_sampler(getattr(sampler, WRAPPERS[kind.__name__]), None)
    if isinstance(sampler, tuple | range):
        return None
    return (
        f"its sampler {kind.__name__} may depend on what training does between two batches, "
        "so it must not be read further ahead"
    )


def _of_accelerate(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "accelerate"
