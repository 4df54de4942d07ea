"""All loaders of the process, and the timers around their iterators.

torch's iterators are timed in their own ``__next__`` (see hooks/dataloader.py). Where ``LoaderRegistry.live`` gives a
pass another source, and for iterables that are not torch's, a ``TimedIterator`` stands between the loop and its source.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from multiprocessing import reduction
from typing import Any, Generic, TypeVar

from fulltilt.recorder.import_watcher import DrawUnit
from fulltilt.recorder.loaders import workers
from fulltilt.recorder.loaders.batches import INSPECT_EVERY, INSPECT_FIRST, count_samples
from fulltilt.recorder.loaders.call_sites import ENGINE, call_sites
from fulltilt.recorder.loaders.loader_stats import (
    LoaderStats,
    describe,
    is_iterable,
    stored,
)
from fulltilt.recorder.marks import Activity, BatchArrived, PassBegan, PassEnded, Point, WaitBegan
from fulltilt.recorder.stacks.frames import callers, shown_line, users_line
from fulltilt.recorder.steps import LONG_WAIT_NS
from fulltilt.recorder.user_code import own_package, owner

# The attribute of torch's iterators that holds our timer.
TIMER = "_fulltilt_timer"
MOST_LOADERS = 64  # told apart by their length; beyond, those made at one place are one
TORCHS_ITERATORS = "torch.utils.data.dataloader"


class LoaderRegistry:
    """All loaders of the process, and which of them the training thread waits for, or was fed by last."""

    def __init__(self, recorder: Any, torch: Any) -> None:
        self.recorder = recorder
        self.gradients: Callable[[], bool] = torch.is_grad_enabled
        self.was_evaluating = False
        self.drawn_elsewhere = False  # a prefetch thread of the user's draws batches
        self.waiting_for: LoaderStats | None = None
        self.feeding: LoaderStats | None = None
        self.unused = False  # a batch was drawn for training, and no backward has come since
        self._drawn: Counter[int] = Counter()  # since then, from loaders of which it is not known whether they train
        workers.process_recorder = recorder
        self.worker_socket = workers.WorkerSocket()
        self.starting_workers = False
        self.override: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        # Called for each pass with the loader, its stats and DataLoader.__iter__; returns the source of batches.
        self.live: Callable[[Any, LoaderStats, Callable[[Any], Any]], Any] | None = None
        self._torch_loader = torch.utils.data.DataLoader
        self._making = threading.local()
        self._by_loader: weakref.WeakKeyDictionary[Any, LoaderStats] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._start_lock = threading.RLock()  # one thread's at a time: torch's worker loop is exchanged meanwhile
        self.all: list[LoaderStats] = []
        self.made = 0  # torch's loaders, so far
        # A loader that is made again in each epoch is one loader to its user: same lines of the script, same length.
        self._made_before: dict[tuple[Any, ...], LoaderStats] = {}

    def evaluating(self, stats: LoaderStats) -> bool:
        """Whether what is drawn now is for evaluation: gradients are off, or the trained model is in eval mode.

        Hugging Face's Trainer draws the next batches before it switches the model back: a loader that has trained
        goes on training.
        """
        return not self.gradients() or (self.recorder.eval_mode and not stats.trains)

    def fed(self, stats: LoaderStats) -> None:
        """A batch was drawn, and not for evaluation."""
        self.feeding, self.unused = stats, True
        self.recorder.gradients_off.batch_drawn()
        if not stats.trains:
            self._drawn[stats.loader_id] += 1

    def trained(self) -> None:
        """backward() is called: the loader drawn last trains, and those from which as much was drawn (zip)."""
        self.unused = False
        if self.feeding is not None and self._drawn:
            times = self._drawn.get(self.feeding.loader_id, 1)
            for loader_id, drawn in self._drawn.items():
                if drawn == times:
                    self.all[loader_id].trains = True
            self._drawn.clear()

    def of(self, loader: Any) -> LoaderStats:
        """The stats of a loader, added when it is first seen."""
        with self._lock:
            stats = self._by_loader.get(loader)
            if stats is None:
                stats = self._by_loader[loader] = self._add_loader(loader)
                if not isinstance(loader, self._torch_loader):  # its constructor was not watched
                    stats.where, stats.made_by, _ = call_sites(loader)
            return stats

    def _add_loader(self, loader: Any) -> LoaderStats:
        unbatched = stored(loader, "batch_sampler") is None and not is_iterable(loader)
        return self.add(loader=weakref.ref(loader), asked_for=1 if unbatched else None)

    def add(self, **known: Any) -> LoaderStats:
        """Stats of one more loader with these fields; without a ``loader`` the description stays as it is."""
        stats = LoaderStats(len(self.all), **known)
        self.all.append(stats)
        return stats

    def constructed(self, loader: Any, given: tuple[str, ...]) -> None:
        """Remember where a loader was constructed and which arguments were written there."""
        if (known := self._by_loader.get(loader)) is not None:
            known.given = given or known.given  # the constructor of a derived class: what the user wrote
            return
        if "_dataset_kind" not in vars(loader):
            return  # a derived class with everything of its own, and no constructor of torch's
        self.recorder.ensure_started()
        self.made += 1
        sites = call_sites(loader)
        # A library may make all its loaders at one line of the user's, without a length: Keras, of a PyDataset.
        in_eval = sites.made_by is not None and self.recorder.eval_mode
        described = describe(loader)
        made_at = (*sites.nearest, described["dataset"], described["shuffle"], in_eval)
        crowded = len(self.all) >= MOST_LOADERS
        key = made_at if crowded else (*made_at, described["dataset_len"])
        with self._lock:
            stats = self._made_before.get(key)
            if stats is None or not (crowded or stats.retired()):
                self._made_before[key] = stats = self._add_loader(loader)
            stats.loader, stats.made_at = weakref.ref(loader), made_at
            stats.constructed += 1
            self._by_loader[loader] = stats
        stats.where, stats.made_by, stats.given = sites.where, sites.made_by, given
        stats.described = described
        if sites.made_by is not None:
            self._inherit(stats, stored(loader, "dataset"))

    def learn_length(self, stats: LoaderStats, loader: Any) -> None:
        """The first batch of a pass has come: by now torch has asked the data set for its length."""
        if stats.described.get("dataset_len") is None and loader is not None:
            stats.read_arguments(loader)
            with self._lock:
                self._made_before.setdefault((*stats.made_at, stats.described["dataset_len"]), stats)

    def _inherit(self, stats: LoaderStats, dataset: Any) -> None:
        """A library made this loader out of one of the user's (accelerate does): then the user's call is the place."""
        for other in self.all:
            made = other.loader()
            if other.made_by is None and other is not stats and made is not None and stored(made, "dataset") is dataset:
                stats.where, stats.made_by, stats.given = other.where, None, other.given
                return

    def iterate(self, original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """DataLoader.__iter__: torch's own, whose iterator has a timer, or what live tuning puts in its place."""
        if self.live is None or not self.recorder.active or not self._measures:
            return original(loader)
        stats, live = self.of(loader), self.live

        def unmeasured(each: Any) -> Iterator[Any]:
            with self._unmeasured():
                return original(each)

        return TimedIterator(self, stats, self._begin_pass(loader, stats, lambda: live(loader, stats, unmeasured)))

    def make_iterator(self, iterator: Any, loader: Any, make: Callable[[], None]) -> None:
        """Construct one of torch's iterators, or of a class derived from them, by ``make``, with a timer in it."""
        if TIMER in vars(iterator) or not self.recorder.active or not self._measures:
            make()
            return
        stats = self.of(loader)
        vars(iterator)[TIMER] = timer = BatchTimer(self, stats)
        timer.begun_by = None if loader.persistent_workers else loader  # that one has the iterator: a cycle
        measured = partial(self.start_workers, make, stats, type(iterator).__module__) if loader.num_workers else make
        self._begin_pass(loader, stats, measured)
        if self.live is not None:
            self.live(loader, stats, lambda _: iterator)  # not by DataLoader.__iter__: it can only take note

    def reset_iterator(self, iterator: Any, loader: Any, reset: Callable[[], None]) -> None:
        """An iterator whose workers persist begins another pass."""
        timer = vars(iterator).get(TIMER)
        if timer is None or not self.recorder.active or timer.first:
            reset()
            return
        timer.first = True
        self._begin_pass(loader, self.of(loader), reset)

    def draw_from(self, library: str, iterable: Any, begin: Callable[[], Any], unit: DrawUnit) -> Any:
        """Another library's iterator, made by ``begin``, with a timer where the training thread draws from it."""
        recorder = self.recorder
        if self._measures:
            recorder.ensure_started()
        # What a DataLoader draws from, or another such iterator, is a part of it.
        if not recorder.on_training_thread() or recorder.activity is not Activity.USER:
            return begin()
        stats = self.of_iterable(library, iterable)
        return TimedIterator(self, stats, self._begin_pass(None, stats, begin), unit)

    def of_iterable(self, made_by: str, iterable: Any) -> LoaderStats:
        """The stats of the iterables of this type that the user's line uses; each epoch may make another."""
        where, _ = users_line()
        with self._lock:
            key = (made_by, where, type(iterable).__name__)
            stats = self._made_before.get(key)
            if stats is None:
                what = describe_iterable(iterable)
                stats = self._made_before[key] = self.add(described=what, where=where, made_by=made_by)
            return stats

    def observe_feed(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of one pass over a loader of fulltilt.feed, with each wait measured."""
        recorder = self.recorder
        recorder.ensure_started()
        # Inside next() of another loader, as in the engine's steps, the wait is measured there.
        if not recorder.active or (recorder.on_training_thread() and recorder.activity is Activity.DATA_WAIT):
            return batches
        stats = self._by_loader.get(loader)
        if stats is None:
            where, made_by = _feed_call_site()
            stats = self.add(described=_describe_feed(loader), where=where, made_by=made_by)
            self._by_loader[loader] = stats
        stats.passes += 1
        return TimedIterator(self, stats, batches)

    def _begin_pass(self, loader: Any, stats: LoaderStats, start: Callable[[], Any]) -> Any:
        recorder = self.recorder
        recorder.resume()
        if loader is not None:
            stats.read_arguments(loader)
        stats.passes += 1
        stats.in_pass = True
        if not recorder.on_training_thread():
            return start()
        began = time.perf_counter()
        before = recorder.switch(Activity.EPOCH_TURNOVER, PassBegan(stats.loader_id, self.evaluating(stats)))
        try:
            return start()
        finally:
            recorder.switch(before)
            if stats.passes > 1:
                stats.restart_s += time.perf_counter() - began

    @property
    def _measures(self) -> bool:
        return not getattr(self._making, "unmeasured", False)

    @contextlib.contextmanager
    def _unmeasured(self) -> Iterator[None]:
        """Iterators that this thread makes inside get no timer: the one around them measures their batches."""
        before, self._making.unmeasured = not self._measures, True
        try:
            yield
        finally:
            self._making.unmeasured = before

    def start_workers(self, start: Callable[[], Any], stats: LoaderStats, module: str = TORCHS_ITERATORS) -> Any:
        """Call ``start``, whose workers run the measured loop in place of the one that ``module`` gives them."""
        home = workers.home_of_loop(module)
        sending = self.worker_socket.opened()
        if sending is None:
            return start()
        with self._start_lock:
            loop, dump = home._worker_loop, reduction.dump
            if getattr(loop, "func", None) is not workers.run_worker:  # a data set may start workers of its own
                workers.plain_loops[home.__name__] = loop
            home._worker_loop = partial(workers.run_worker, sending, stats.loader_id, stats.passes, home.__name__)
            reduction.dump = partial(_count_pickled, stats, dump)  # called for workers that are not forked
            self.starting_workers = True
            try:
                return start()
            finally:
                self.starting_workers = False
                home._worker_loop, reduction.dump = loop, dump


def _count_pickled(stats: LoaderStats, dump: Callable[..., Any], obj: Any, file: Any, *args: Any) -> None:
    """multiprocessing.reduction.dump, with its bytes and seconds counted. Of each worker its process comes last."""
    began, before = time.perf_counter(), file.tell()
    dump(obj, file, *args)
    stats.pickle_s += time.perf_counter() - began
    stats.pickled_bytes += file.tell() - before
    stats.pickled_workers += not isinstance(obj, dict)  # what prepares the interpreter is a dict


# --------------------------------------------------------------------------- iterators

# Reading a thread's CPU clock is a system call: done for the first batches, and then at this interval.
TIME_CPU_FIRST = 64
TIME_CPU_EVERY = 8
WAITS = {False: WaitBegan(False), True: WaitBegan(True)}


class BatchTimer:
    """Measures every draw from one iterator.

    ``unit`` is what a draw from another library's iterator brings. A DataLoader inside of it measures in its place.
    """

    def __init__(self, loaders: LoaderRegistry, stats: LoaderStats, unit: DrawUnit | None = None) -> None:
        self._unit = unit
        self._passes_on = False  # a DataLoader inside measures
        self._loaders = loaders
        self._stats = stats
        self._recorder = loaders.recorder
        self._drawing = False
        self.first = True  # the next draw is the first of a pass
        self.begun_by: Any = None  # the loader, until then: in `for batch in DataLoader(...)` nothing else keeps it

    def draw(self, source: Any, next_batch: Callable[[Any], Any]) -> Any:
        """The next batch of ``source``, which ``next_batch(source)`` returns.

        In a pause it is only counted, here and with few calls: a step of a millisecond pays for each of them.
        """
        recorder, stats = self._recorder, self._stats
        if self._drawing or self._passes_on or not recorder.active:
            return next_batch(source)  # the __next__ of a class calls that of its base
        self._drawing = True
        try:
            if threading.get_ident() != recorder.thread_id:
                return self._from_another_thread(source, next_batch)
            evaluating = not self._loaders.gradients() or (recorder.eval_mode and self._loaders.evaluating(stats))
            bursts = recorder.bursts
            if not bursts.paused or evaluating or self.first:
                return self._draw(source, next_batch, evaluating)
            began_ns = time.perf_counter_ns()
            try:
                batch = next_batch(source)
            except BaseException as error:
                self._ended_in_pause(began_ns, time.perf_counter_ns(), source, isinstance(error, StopIteration))
                raise
            ended_ns = time.perf_counter_ns()
            stats.wait_s += (ended_ns - began_ns) * 1e-9
            if ended_ns - began_ns > LONG_WAIT_NS:
                recorder.waited_in_pause(began_ns, ended_ns)
            samples = self._count(batch)
            batches, before = bursts.drawn.get(stats.loader_id, (0, 0))
            bursts.drawn[stats.loader_id] = (batches + 1, before + (samples or 0))
            return batch
        finally:
            self._drawing = False

    def _draw(self, source: Any, next_batch: Callable[[Any], Any], evaluating: bool) -> Any:
        loaders, stats = self._loaders, self._stats
        recorder = loaders.recorder
        recorder.resume()
        if evaluating:
            recorder.gradients_off.is_seen_otherwise()
        changed = evaluating != loaders.was_evaluating
        loaders.was_evaluating = evaluating
        loaders.waiting_for = stats
        before = recorder.switch(Activity.DATA_WAIT, WAITS[evaluating], Point.EVAL if changed else Point.NONE)
        first, self.first = self.first, False
        workers = _workers(source)
        timed = first or stats.batches < TIME_CPU_FIRST or stats.batches % TIME_CPU_EVERY == 0
        cpu = time.thread_time() if timed else 0.0
        all_cpu = time.process_time() if timed and not workers else 0.0
        began = stats.waiting_since_s = time.perf_counter()
        try:
            batch = next_batch(source)
        except StopIteration:
            stats.waiting_since_s = None
            stats.restart_s += time.perf_counter() - began
            stats.in_pass = False
            loaders.was_evaluating = recorder.eval_mode
            recorder.switch(
                before, PassEnded(stats.loader_id, evaluating, workers), Point.EVAL if evaluating else Point.NONE
            )
            raise
        except BaseException:
            # Often Ctrl-C, because no batch comes any more: that wait, too, is the loader's.
            cpu_s = time.thread_time() - cpu if timed else 0.0
            self._note_wait(first, workers, time.perf_counter() - began, cpu_s)
            recorder.switch(before)
            raise
        if self._unit is not None and loaders.waiting_for is not stats:
            recorder.switch(before)
            self._passes_on = True
            return batch
        waited = time.perf_counter() - began
        thread_cpu_s = time.thread_time() - cpu if timed else None
        all_cpu_s = time.process_time() - all_cpu if timed and not workers else None
        self._note_wait(first, workers, waited, thread_cpu_s, all_cpu_s)
        if first:
            loaders.learn_length(stats, stats.loader() if self.begun_by is None else self.begun_by)
            self.begun_by = None
        samples = self._count(batch)
        doubtful = evaluating and loaders.gradients()
        fact = BatchArrived(stats.loader_id, samples, evaluating, first, workers, doubtful)
        recorder.switch(before, fact, Point.NONE if evaluating else Point.BATCH)
        if evaluating:
            stats.eval_batches += 1
            recorder.evaluation.drew(sys._getframe(1), recorder.loop_frames.loop)
        else:
            loaders.fed(stats)
            recorder.calibrate_if_asked(Point.BATCH)
        return batch

    def _ended_in_pause(self, began_ns: int, ended_ns: int, source: Any, exhausted: bool) -> None:
        """The pass has ended, or an exception the wait, which is then the loader's and took no CPU time."""
        stats, recorder = self._stats, self._loaders.recorder
        wait_s, workers = (ended_ns - began_ns) * 1e-9, _workers(source)
        if ended_ns - began_ns > LONG_WAIT_NS:
            recorder.waited_in_pause(began_ns, ended_ns, turnover=exhausted and workers > 0)
        recorder.resume()
        if exhausted:
            stats.restart_s += wait_s
            stats.in_pass = False
            recorder.switch(recorder.activity, PassEnded(stats.loader_id, False, workers))
        else:
            stats.wait_s += wait_s
            stats.timed_wait_s += wait_s

    def _note_wait(
        self, first: bool, workers: int, wait_s: float, cpu_s: float | None, all_cpu_s: float | None = None
    ) -> None:
        """A wait has ended; ``all_cpu_s`` is the CPU time of all threads of the process meanwhile."""
        stats = self._stats
        stats.waiting_since_s = None
        if first and stats.passes == 1 and (workers or not self._recorder.training):
            stats.first_wait_s += wait_s  # a part of start-up, in which modules are imported and files opened
        elif first and workers:
            stats.restart_s += wait_s
        else:
            stats.wait_s += wait_s
            if cpu_s is not None:
                stats.timed_wait_s += wait_s
                stats.timed_cpu_s += cpu_s
                stats.timed_helpers_cpu_s += max(all_cpu_s - cpu_s, 0.0) if all_cpu_s is not None else 0.0

    def _count(self, batch: Any) -> int | None:
        stats = self._stats
        samples = self._samples_of(batch)
        stats.batches += 1
        if samples is not None:
            stats.samples += samples
            stats.counted = True
        if stats.batches <= INSPECT_FIRST or stats.batches % INSPECT_EVERY == 0:
            stats.facts.inspect(batch)
        return samples

    def _samples_of(self, batch: Any) -> int | None:
        stats, unit = self._stats, self._unit
        if unit is not None and (unit == "sample" or (isinstance(batch, Mapping) and "__key__" in batch)):
            return 1  # WebDataset's have a key where they are not batched
        if unit == "columns" and isinstance(batch, Mapping):
            return max((len(column) for column in batch.values()), default=0)
        return count_samples(batch, stats.described.get("batch_size") or stats.asked_for, stats.last_batch_size)

    def _from_another_thread(self, source: Any, next_batch: Callable[[Any], Any]) -> Any:
        """A prefetching thread of the user's draws: count the batch, for which the training thread did not wait."""
        batch, recorder = next_batch(source), self._loaders.recorder
        if recorder.active:
            samples = self._count(batch)
            if self._loaders.evaluating(self._stats):
                self._stats.eval_batches += 1
            else:
                self._loaders.fed(self._stats)
                self._loaders.drawn_elsewhere = True
                recorder.note(BatchArrived(self._stats.loader_id, samples, False, False, 1))
        return batch


def _workers(source: Any) -> int:
    """How many workers the batches come from at this moment."""
    return int(getattr(source, "_num_workers", 0))


class TimedIterator(BatchTimer):
    """An iterator with a timer; all other attributes are those of its source."""

    def __init__(self, loaders: LoaderRegistry, stats: LoaderStats, source: Any, unit: DrawUnit | None = None) -> None:
        super().__init__(loaders, stats, unit)
        self.source = source

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() answers as it would without us
        return self.source.__class__

    def __iter__(self) -> TimedIterator:
        return self

    def __len__(self) -> int:
        return len(self.source)

    def __bool__(self) -> bool:  # a generator is true, and has no length
        return bool(self.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __next__(self) -> Any:
        return self.draw(self.source, next)


Item = TypeVar("Item")


class TimedIterable(Generic[Item]):
    """Any iterable of batches; its iterators have a timer."""

    def __init__(self, loaders: LoaderRegistry, batches: Iterable[Item]) -> None:
        self._loaders = loaders
        self._batches = batches
        self._stats = loaders.of_iterable("script", batches)

    def __iter__(self) -> Iterator[Item]:
        self._stats.passes += 1
        return TimedIterator(self._loaders, self._stats, iter(self._batches))

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def describe_iterable(batches: Iterable[Any], **known: Any) -> dict[str, Any]:
    """What a loader record says of an iterable; what is not ``known`` is as for one on the training thread."""
    unknown = {"dataset_len": None, "iterable": True, "batch_size": None, "num_workers": 0}
    return {"dataset": type(batches).__name__, **unknown, **known}


def _feed_call_site() -> tuple[str | None, str | None]:
    """The user's line that draws the batches; None and ENGINE where settings make the loader."""
    for frame in callers(sys._getframe(2)):
        filename = frame.f_code.co_filename
        if owner(filename) == "user":
            return shown_line(frame), None
        if own_package(filename) in ("train", "recipes"):
            return None, ENGINE
    return None, None


def _describe_feed(loader: Any) -> dict[str, Any]:
    dataset, order = getattr(loader, "dataset", loader), getattr(loader, "order", None)
    return describe_iterable(
        dataset,
        dataset_len=getattr(order, "samples", None),
        iterable=False,
        batch_size=getattr(order, "batch_size", None),
        num_workers=getattr(loader, "workers", 0),
        persistent_workers=True,
        shuffle=getattr(order, "shuffle", None),
    )
