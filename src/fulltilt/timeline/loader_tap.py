"""The tap on DataLoader: every batch passes through it, so that waits are measured and batches are counted.

The tap's iterator stands between the loop and torch's iterator, its ``source``. ``LoaderTaps.live`` may give it another
source: live tuning does, and exchanges the pool of workers behind it between two batches.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from fulltilt.records import LoaderRecord
from fulltilt.timeline import worker_tap
from fulltilt.timeline.batches import count_bytes, count_samples, kind_of, padding_share
from fulltilt.timeline.marks import Activity, BatchArrived, PassBegan, PassEnded, Point, WaitBegan
from fulltilt.timeline.rest import LONG_WAIT_NS
from fulltilt.timeline.stacks import owner, shown_path

# A batch's size and padding are measured on the first few batches and then on every so many.
INSPECT_FIRST = 4
INSPECT_EVERY = 32
# Reading a thread's CPU clock is a system call: done for the first batches and then for every so many.
TIME_CPU_FIRST = 64
TIME_CPU_EVERY = 8
# What a loader is ``made_by`` when the engine has made it from the settings of a training.
ENGINE = "fulltilt"
WAITS = {False: WaitBegan(False), True: WaitBegan(True)}


@dataclass
class LoaderTap:
    """One DataLoader: how it was made and what passed through it."""

    loader_id: int
    where: str | None
    given: tuple[str, ...]
    loader: Callable[[], Any]
    described: dict[str, Any] = field(default_factory=dict)
    asked_for: int | None = None  # indices in each request, where there is no batch size: 1 without batching
    eval_batches: int = 0
    passes: int = 0
    in_pass: bool = False
    made_by: str | None = None
    trains: bool = False
    batches: int = 0
    samples: int = 0
    counted: bool = False
    wait_s: float = 0.0
    timed_wait_s: float = 0.0
    timed_cpu_s: float = 0.0
    first_wait_s: float = 0.0
    restart_s: float = 0.0
    batch_bytes: int | None = None
    batch_kind: str | None = None
    padding: float = 0.0
    padding_seen: int = 0
    # What live tuning has put in force instead of the loader's own arguments.
    in_force: dict[str, Any] = field(default_factory=dict)

    def retired(self) -> bool:
        """Whether this loader has served its passes, so that one made at the same place stands for it."""
        return self.loader() is None or (self.passes > 0 and not self.in_pass)

    @property
    def serial(self) -> bool:
        """Whether the training thread fetches its batches itself."""
        return {**self.described, **self.in_force}.get("num_workers") == 0

    @property
    def wait_cpu_s(self) -> float:
        """CPU time of the training thread inside next(), from the waits in which it was measured."""
        return self.wait_s * self.timed_cpu_s / self.timed_wait_s if self.timed_wait_s else 0.0

    def inspect(self, batch: Any) -> None:
        """Look into some of the batches."""
        if self.batches > INSPECT_FIRST and self.batches % INSPECT_EVERY:
            return
        self.batch_bytes = max(self.batch_bytes or 0, count_bytes(batch))
        self.batch_kind = self.batch_kind or kind_of(batch)
        share = padding_share(batch)
        if share is not None:
            self.padding += share
            self.padding_seen += 1

    def record(self, trained: bool) -> LoaderRecord:
        """The loader as a record."""
        loader = self.loader()
        if loader is not None:
            self.described = describe(loader)
        role = "train" if trained else "eval" if self.batches else "unused"
        return LoaderRecord(
            loader_id=self.loader_id,
            role=role,  # type: ignore[arg-type]
            where=self.where,
            made_by=self.made_by,
            given=self.given,
            passes=self.passes,
            batches=self.batches,
            samples=self.samples if self.counted else None,
            batch_bytes=self.batch_bytes,
            batch_kind=self.batch_kind,
            wait_s=self.wait_s,
            wait_cpu_s=self.wait_cpu_s,
            first_wait_s=self.first_wait_s,
            restart_s=self.restart_s,
            padding_share=self.padding / self.padding_seen if self.padding_seen else None,
            **{**self.described, **self.in_force},
        )


def describe(loader: Any) -> dict[str, Any]:
    """The arguments in force of a DataLoader, as plain values."""
    dataset, sampler = loader.dataset, getattr(loader, "sampler", None)
    name = type(sampler).__name__ if sampler is not None else None
    context: Any = getattr(loader, "multiprocessing_context", None)
    return {
        "dataset": type(_users_own(dataset)).__name__,
        "dataset_len": _length(_users_own(dataset)),
        "iterable": _is_iterable(loader),
        "batch_size": _batch_size(loader),
        "num_workers": int(loader.num_workers),
        "prefetch_factor": loader.prefetch_factor,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "drop_last": bool(loader.drop_last),
        "shuffle": {"RandomSampler": True, "SequentialSampler": False}.get(name or ""),
        "sampler": name,
        "collate": _name(loader.collate_fn),
        "start_method": context.get_start_method() if context is not None else None,
    }


def _users_own(dataset: Any) -> Any:
    """The data set that the user knows: the engine puts one of its own around it."""
    return getattr(dataset, "samples", dataset) if type(dataset).__module__.startswith("fulltilt.") else dataset


def _is_iterable(loader: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def _batch_size(loader: Any) -> int | None:
    size = loader.batch_size
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:
        return None


def _name(function: Any) -> str | None:
    return getattr(function, "__qualname__", None) or type(function).__name__


class TappedIterator:
    """A loader's iterator with a meter. Everything it does not know itself it asks its source."""

    def __init__(self, taps: LoaderTaps, tap: LoaderTap, source: Any) -> None:
        self._taps = taps
        self._tap = tap
        self._first = True
        self.source = source

    @property
    def workers(self) -> int:
        """How many workers the batches come from at this moment."""
        return int(getattr(self.source, "_num_workers", 0))

    def __iter__(self) -> TappedIterator:
        return self

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __next__(self) -> Any:
        taps, tap = self._taps, self._tap
        recorder = taps.recorder
        if not recorder.mine():
            return self._from_another_thread(recorder)
        evaluating = taps.evaluating(tap)
        if recorder.rest.on:
            if not evaluating and not self._first:
                return self._at_rest(recorder)
            recorder.wake()
        changed = evaluating != taps.was_evaluating
        taps.was_evaluating = evaluating
        taps.waiting_for = tap
        before = recorder.switch(Activity.NEXT, WAITS[evaluating], Point.EVAL if changed else Point.NONE)
        first, self._first = self._first, False
        workers = self.workers
        timed = first or tap.batches < TIME_CPU_FIRST or tap.batches % TIME_CPU_EVERY == 0
        cpu = time.thread_time() if timed else 0.0
        began = time.perf_counter()
        try:
            batch = self.source.__next__()
        except StopIteration:
            tap.restart_s += time.perf_counter() - began
            tap.in_pass = False
            taps.was_evaluating = recorder.eval_mode
            recorder.switch(
                before, PassEnded(tap.loader_id, evaluating, workers), Point.EVAL if evaluating else Point.NONE
            )
            raise
        except BaseException:
            recorder.switch(before)
            raise
        waited = time.perf_counter() - began
        self._note_wait(first and workers > 0, waited, time.thread_time() - cpu if timed else None)
        samples = self._count(batch)
        doubtful = evaluating and taps.gradients()
        fact = BatchArrived(tap.loader_id, samples, evaluating, first, workers, doubtful)
        recorder.switch(before, fact, Point.NONE if evaluating else Point.BATCH)
        if not evaluating:
            taps.feeding = tap
            recorder.calibrate_if_asked(Point.BATCH)
        return batch

    def _at_rest(self, recorder: Any) -> Any:
        """A batch that is only counted."""
        tap, rest = self._tap, recorder.rest
        began = time.perf_counter_ns()
        try:
            batch = self.source.__next__()
        except StopIteration:
            recorder.wake()
            tap.in_pass = False
            recorder.switch(recorder.activity, PassEnded(tap.loader_id, False, self.workers))
            raise
        except BaseException:
            recorder.wake()
            raise
        ended = time.perf_counter_ns()
        tap.wait_s += (ended - began) * 1e-9
        if ended - began > LONG_WAIT_NS:
            recorder.waited_at_rest(began, ended)
        rest.batches += 1
        rest.samples += self._count(batch) or 0
        return batch

    def _note_wait(self, first: bool, wait_s: float, cpu_s: float | None) -> None:
        tap = self._tap
        if first and tap.passes == 1:
            tap.first_wait_s += wait_s
        elif first:
            tap.restart_s += wait_s
        else:
            tap.wait_s += wait_s
            if cpu_s is not None:
                tap.timed_wait_s += wait_s
                tap.timed_cpu_s += cpu_s

    def _count(self, batch: Any) -> int | None:
        tap = self._tap
        samples = count_samples(batch, tap.described.get("batch_size") or tap.asked_for)
        tap.batches += 1
        if samples is not None:
            tap.samples += samples
            tap.counted = True
        tap.inspect(batch)
        return samples

    def _from_another_thread(self, recorder: Any) -> Any:
        """A prefetching thread of the user's draws: count the batch, but the training thread did not wait for it."""
        batch = self.source.__next__()
        if recorder.active:
            samples = self._count(batch)
            evaluating = self._taps.evaluating(self._tap)
            if not evaluating:
                self._taps.feeding = self._tap
                self._taps.drawn_elsewhere = True
            recorder.note(BatchArrived(self._tap.loader_id, samples, evaluating, False, 1))
        return batch


class LoaderTaps:
    """All DataLoaders of the process."""

    def __init__(self, recorder: Any, torch: Any) -> None:
        self.recorder = recorder
        self.mailbox = worker_tap.Mailbox()
        self.was_evaluating = False
        self.starting_workers = False
        # Whether a thread of the user's own draws batches for the training thread.
        self.drawn_elsewhere = False
        self.waiting_for: LoaderTap | None = None
        self.feeding: LoaderTap | None = None
        self.override: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        # Called for each pass with the loader, its tap and what would begin the pass; returns the source of batches.
        self.live: Callable[[Any, LoaderTap, Callable[[], Any]], Any] | None = None
        self.gradients: Callable[[], bool] = torch.is_grad_enabled
        self._torch = torch
        self._taps: weakref.WeakKeyDictionary[Any, LoaderTap] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self.all: list[LoaderTap] = []
        # A loader made anew in each epoch is one loader to its user: same lines of the script, same length.
        self._made_before: dict[tuple[Any, ...], LoaderTap] = {}

    def evaluating(self, tap: LoaderTap) -> bool:
        """Whether what is drawn now is for evaluation: gradients are off, or the trained model is in eval mode.

        Hugging Face's Trainer draws the next batches before it switches the model back: a loader that has trained
        goes on training.
        """
        return not self.gradients() or (self.recorder.eval_mode and not tap.trains)

    def trained(self) -> None:
        """backward() is called: the loader drawn last is one that trains."""
        if self.feeding is not None:
            self.feeding.trains = True

    def of(self, loader: Any) -> LoaderTap:
        """The tap of a loader, made when it is first seen."""
        with self._lock:
            tap = self._taps.get(loader)
            if tap is None:
                tap = self._taps[loader] = self._new(loader)
            return tap

    def _new(self, loader: Any) -> LoaderTap:
        unbatched = getattr(loader, "batch_sampler", None) is None and not _is_iterable(loader)
        tap = LoaderTap(len(self.all), None, (), weakref.ref(loader), asked_for=1 if unbatched else None)
        self.all.append(tap)
        return tap

    def constructed(self, loader: Any, given: tuple[str, ...]) -> None:
        """Remember where a loader was constructed and which arguments were written there."""
        self.recorder.ensure_started()
        sites = call_sites(loader)
        described = describe(loader)
        key = (*sites.nearest, described["dataset_len"])
        with self._lock:
            tap = self._made_before.get(key)
            if tap is None or not tap.retired():
                self._made_before[key] = tap = self._new(loader)
            tap.loader = weakref.ref(loader)
            self._taps[loader] = tap
        tap.where, tap.made_by, tap.given = sites.where, sites.made_by, given
        tap.described = described
        if sites.made_by is not None:
            self._inherit(tap, loader.dataset)

    def _inherit(self, tap: LoaderTap, dataset: Any) -> None:
        """A library made this loader out of one of the user's (accelerate does): then the user's call is the place."""
        for other in self.all:
            made = other.loader()
            if other.made_by is None and other is not tap and made is not None and made.dataset is dataset:
                tap.where, tap.made_by, tap.given = other.where, None, other.given
                return

    def iterate(self, original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """DataLoader.__iter__ with the tap in between."""
        recorder = self.recorder
        tap = self.of(loader)
        if not recorder.active:
            return original(loader)
        recorder.wake()
        tap.described = describe(loader)
        tap.passes += 1
        tap.in_pass = True
        if not recorder.mine():
            return TappedIterator(self, tap, self._begin(original, loader, tap))
        evaluating = self.evaluating(tap)
        began = time.perf_counter()
        before = recorder.switch(Activity.ITER, PassBegan(tap.loader_id, evaluating))
        try:
            source = self._begin(original, loader, tap)
        finally:
            recorder.switch(before)
        if tap.passes > 1:
            tap.restart_s += time.perf_counter() - began
        return TappedIterator(self, tap, source)

    def _begin(self, original: Callable[[Any], Any], loader: Any, tap: LoaderTap) -> Any:
        begin = partial(self.with_meters, partial(original, loader), tap)
        return begin() if self.live is None else self.live(loader, tap, begin)

    def with_meters(self, start: Callable[[], Any], tap: LoaderTap) -> Any:
        """Let torch start workers while its worker loop is exchanged for the measured one."""
        workers = self._torch.utils.data._utils.worker
        if self.mailbox.address is None:
            return start()
        plain = worker_tap.plain_loop = workers._worker_loop
        workers._worker_loop = partial(worker_tap.run_worker, self.mailbox.address, tap.loader_id)
        self.starting_workers = True
        try:
            return start()
        finally:
            self.starting_workers = False
            workers._worker_loop = plain


class CallSites(NamedTuple):
    """Where a loader was constructed: the user's line, the library that line calls, and the nearest lines of all."""

    where: str | None
    made_by: str | None
    nearest: tuple[str, ...]


def call_sites(loader: Any, most: int = 4) -> CallSites:
    """The calls that led to the construction of a loader, outside of torch and of the construction itself."""
    sites: list[str] = []
    where: str | None = None
    library: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (where is None or len(sites) < most):
        code = frame.f_code
        who = owner(code.co_filename)
        # The constructor of a class of its own, or a library's wrapper around the constructor.
        constructs = code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is loader
        if who in ("user", "site") and not constructs:
            sites.append(f"{shown_path(code.co_filename)}:{frame.f_lineno}")
            if where is None and who == "user":
                where = sites[-1]
            elif where is None and library != ENGINE:
                library = str(frame.f_globals.get("__name__", "")).partition(".")[0] or None
        elif who == "fulltilt" and where is None and not _only_observes(code.co_filename):
            library = ENGINE
        frame = frame.f_back
    if library == ENGINE:
        # Settings make the loader; on the line that starts the training there is nothing to change.
        return CallSites(None, ENGINE, tuple(sites[:most]))
    return CallSites(where or (sites[0] if sites else None), library, tuple(sites[:most]))


def _only_observes(filename: str) -> bool:
    """Whether a file of Fulltilt's stands in a call of the user's, rather than making one of its own."""
    path = filename.replace("\\", "/")
    return "/timeline/" in path or "/tune/" in path


def given_arguments(original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The names of the arguments that the user wrote in a DataLoader(...) call."""
    try:
        bound = inspect.signature(original).bind(None, *args, **kwargs)
    except TypeError:
        return tuple(kwargs)
    return tuple(name for name in bound.arguments if name != "self")
