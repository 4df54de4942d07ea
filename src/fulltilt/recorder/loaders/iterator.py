"""One loader and its iterator: how it was made, every wait for a batch, every batch counted.

torch's iterators measure themselves (see hooks/dataloader.py). Where ``LoaderTaps.live`` gives a pass another source,
and for iterables that are none of torch's, a ``TappedIterator`` stands between the loop and its source.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from fulltilt.recorder.loaders.batches import (
    compressed_chunks,
    count_bytes,
    count_samples,
    kind_of,
    padding_share,
    shapes_of,
)
from fulltilt.recorder.marks import Activity, BatchArrived, PassEnded, Point, WaitBegan
from fulltilt.recorder.stacks.frames import LineTimes
from fulltilt.recorder.steps import LONG_WAIT_NS
from fulltilt.records import LoaderRecord

# A batch's size and padding are measured on the first few batches and then on every so many.
INSPECT_FIRST = 4
INSPECT_EVERY = 32
MOST_SHAPES = 64
# Workers tell every half second, and when they end.
LAST_WORDS_S = 0.45
# Draws by which it is judged whether a loader's source works ahead of the training: the latest, and at least so many.
LATEST_DRAWS, FEWEST_DRAWS = 512, 16
# What a data set may keep of its samples; fewer objects than this take no memory to speak of.
COLLECTIONS, MANY_OBJECTS = (list, tuple, dict, set), 10_000


@dataclass
class LoaderTap:
    """One DataLoader: how it was made and what passed through it."""

    loader_id: int
    where: str | None
    given: tuple[str, ...]
    loader: Callable[[], Any]
    described: dict[str, Any] = field(default_factory=dict)
    asked_for: int | None = None  # indices in each request, where there is no batch size: 1 without batching
    last_batch_size: int | None = None  # of a pass; None where it is no smaller, or nothing tells
    eval_batches: int = 0
    passes: int = 0
    in_pass: bool = False
    pass_began_s: float = 0.0
    made_by: str | None = None
    constructed: int = 0
    trains: bool = False
    batches: int = 0
    samples: int = 0
    counted: bool = False
    wait_s: float = 0.0
    waiting_since_s: float | None = None
    timed_wait_s: float = 0.0
    timed_cpu_s: float = 0.0
    first_wait_s: float = 0.0
    restart_s: float = 0.0
    arrived: tuple[int, float] = (-1, 0.0)  # how many batches had come, and when the last of them did
    draws: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=LATEST_DRAWS))  # pause, wait
    pickled_workers: int = 0
    pickled_bytes: int = 0
    pickle_s: float = 0.0
    batch_bytes: int | None = None
    batch_kind: str | None = None
    chunks: str | None = None
    shapes: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)
    padding: float = 0.0
    padding_seen: int = 0
    sampler_lines: LineTimes = field(default_factory=LineTimes)
    # What live tuning has put in force instead of the loader's own arguments.
    in_force: dict[str, Any] = field(default_factory=dict)
    serving_workers: int | None = None  # of the pool that serves now, on trial or in force

    def look_at(self, loader: Any) -> None:
        """Take in what the loader says of itself as a pass begins."""
        self.described, self.last_batch_size = describe(loader), _last_batch_size(loader)

    def retired(self) -> bool:
        """Whether this loader has served its passes, so that one made at the same place stands for it."""
        return self.loader() is None or (self.passes > 0 and not self.in_pass)

    @property
    def pass_of_message(self) -> int:
        """The pass of which a worker's message tells that arrives now: one behind the turn of passes is the last's."""
        return self.passes - (self.passes > 1 and time.perf_counter() - self.pass_began_s < LAST_WORDS_S)

    @property
    def serial(self) -> bool:
        """Whether the training thread fetches its batches itself."""
        serving = self.serving_workers
        return (self.described.get("num_workers") if serving is None else serving) == 0

    @property
    def waited_s(self) -> float:
        """The waits so far, with the one under way: a loader that hangs never ends it."""
        since_s = self.waiting_since_s
        return self.wait_s + (time.perf_counter() - since_s if since_s is not None else 0.0)

    @property
    def wait_cpu_s(self) -> float:
        """CPU time of the training thread inside next(), from the waits in which it was measured."""
        return self.wait_s * self.timed_cpu_s / self.timed_wait_s if self.timed_wait_s else 0.0

    def inspect(self, batch: Any) -> None:
        """Look into a batch: some of them are enough."""
        self.batch_bytes = max(self.batch_bytes or 0, count_bytes(batch))
        self.batch_kind = self.batch_kind or kind_of(batch)
        if self.chunks is None and self.batches <= INSPECT_FIRST:
            self.chunks = compressed_chunks()
        if len(self.shapes) < MOST_SHAPES:
            self.shapes.add(shapes_of(batch))
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
            constructed=max(self.constructed, 1),  # none where it was made before anybody looked
            passes=self.passes,
            batches=self.batches,
            eval_batches=self.eval_batches,
            samples=self.samples if self.counted else None,
            batch_bytes=self.batch_bytes,
            batch_kind=self.batch_kind,
            batch_shapes=len(self.shapes) or None,
            wait_s=self.waited_s,
            wait_cpu_s=self.wait_cpu_s,
            first_wait_s=self.first_wait_s,
            restart_s=self.restart_s,
            wait_slope=wait_slope(tuple(self.draws)),
            pickled_workers=self.pickled_workers,
            pickled_bytes=self.pickled_bytes // max(self.pickled_workers, 1),
            pickle_s=self.pickle_s,
            padding_share=self.padding / self.padding_seen if self.padding_seen else None,
            sampler_lines=self.sampler_lines.top(),
            **{**self.described, **self.in_force},
        )


def wait_slope(draws: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """How the wait for a batch changes with each second of pause before it, and three standard errors of that.

    By the differences between one draw and the next: a job that slows down has longer pauses and longer waits. None
    where there are too few; long pauses (a validation) say nothing of usual ones.
    """
    usual_s = 2 * median(pause_s for pause_s, _ in draws) if draws else 0.0
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(draws) if max(a[0], b[0]) <= usual_s]
    spread = sum(pause_s**2 for pause_s, _ in steps)
    if len(steps) < FEWEST_DRAWS or not spread:
        return None
    slope = sum(pause_s * wait_s for pause_s, wait_s in steps) / spread
    left = sum((wait_s - slope * pause_s) ** 2 for pause_s, wait_s in steps)
    return slope, 3 * (left / spread / len(steps)) ** 0.5


def describe(loader: Any) -> dict[str, Any]:
    """The arguments in force of a DataLoader, or of what stands for one, as plain values."""
    public = getattr(loader, "d", loader)  # fastai gives torch's iterators a stand-in; the loader is behind it
    dataset, sampler = public.dataset, getattr(loader, "sampler", None)
    shuffle = {"RandomSampler": True, "SequentialSampler": False}.get(type(sampler).__name__)
    context: Any = getattr(loader, "multiprocessing_context", None)
    method = getattr(context, "get_start_method", None)
    return {
        "dataset": type(_users_own(dataset)).__name__,
        "dataset_len": _length(_users_own(dataset)),
        "iterable": is_iterable(loader) and public is loader,
        "batch_size": _batch_size(public),
        "num_workers": int(loader.num_workers),
        "prefetch_factor": loader.prefetch_factor if loader.num_workers else None,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "shuffle": shuffle if public is loader else bool(getattr(public, "shuffle", False)),
        "collate": _name(loader.collate_fn),
        "start_method": method() if method is not None else None,
        "objects": _most_objects(_users_own(dataset)),
    }


def _users_own(dataset: Any) -> Any:
    """The data set that the user knows: the engine puts one of its own around it."""
    return getattr(dataset, "samples", dataset) if type(dataset).__module__.startswith("fulltilt.") else dataset


def _most_objects(dataset: Any) -> str | None:
    """The attribute that holds most objects in a list, tuple, dict or set: ``self.paths, a list of 1,200,000``."""
    attributes = list(getattr(dataset, "__dict__", {}).items())  # none for a class with slots, or a plain list
    kept = [(len(value), name, value) for name, value in attributes if type(value) in COLLECTIONS]
    number, name, value = max(kept, key=lambda one: one[0], default=(0, "", None))
    return f"self.{name}, a {type(value).__name__} of {number:,}" if number >= MANY_OBJECTS else None


def is_iterable(loader: Any) -> bool:
    """Whether a loader's data set has no indices to draw."""
    return bool(getattr(loader, "_dataset_kind", 0))  # torch's: 0 for a map, 1 for an iterable


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or getattr(loader, "bs", None)
    return size if isinstance(size, int) else None


def _last_batch_size(loader: Any) -> int | None:
    size, indices = _batch_size(loader), _length(getattr(loader, "sampler", None))
    return (indices % size or None) if size and indices and not is_iterable(loader) else None


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:
        return None


def _name(function: Any) -> str | None:
    return getattr(function, "__qualname__", None) or type(function).__name__


class Drawing:
    """What the taps of a process know together."""

    def __init__(self, recorder: Any, gradients: Callable[[], bool]) -> None:
        self.recorder = recorder
        self.gradients = gradients
        self.was_evaluating = False
        # Whether a thread of the user's own draws batches for the training thread.
        self.drawn_elsewhere = False
        self.waiting_for: LoaderTap | None = None
        self.feeding: LoaderTap | None = None
        self.unused = False  # a batch was drawn for training, and no backward has come since

    def evaluating(self, tap: LoaderTap) -> bool:
        """Whether what is drawn now is for evaluation: gradients are off, or the trained model is in eval mode.

        Hugging Face's Trainer draws the next batches before it switches the model back: a loader that has trained
        goes on training.
        """
        return not self.gradients() or (self.recorder.eval_mode and not tap.trains)

    def trained(self) -> None:
        """backward() is called: the loader drawn last is one that trains."""
        self.unused = False
        if self.feeding is not None:
            self.feeding.trains = True


# Reading a thread's CPU clock is a system call: done for the first batches and then for every so many.
TIME_CPU_FIRST = 64
TIME_CPU_EVERY = 8
WAITS = {False: WaitBegan(False), True: WaitBegan(True)}


class PassMeter:
    """Measures every draw from one iterator. One that ``defers`` leaves it to a DataLoader inside, if there is one."""

    defers = passes_on = False

    def __init__(self, taps: Drawing, tap: LoaderTap) -> None:
        self._taps = taps
        self._tap = tap
        self._recorder = taps.recorder
        self._drawing = False
        self.first = True  # the next draw is the first of a pass

    def draw(self, source: Any, following: Callable[[Any], Any]) -> Any:
        """The next batch of ``source``, which ``following`` gives.

        At rest it is only counted, here and with few calls: a step of a millisecond pays for each of them.
        """
        recorder, tap = self._recorder, self._tap
        if self._drawing or self.passes_on or not recorder.active:
            return following(source)  # the __next__ of a class calls that of its base
        self._drawing = True
        try:
            if threading.get_ident() != recorder.thread_id:
                return self._from_another_thread(source, following)
            evaluating = not self._taps.gradients() or (recorder.eval_mode and self._taps.evaluating(tap))
            rest = recorder.rest
            if not rest.on or evaluating or self.first:
                return self._draw(source, following, evaluating)
            began_ns = time.perf_counter_ns()
            try:
                batch = following(source)
            except BaseException as error:
                self._ended_at_rest(began_ns, time.perf_counter_ns(), source, isinstance(error, StopIteration))
                raise
            ended_ns = time.perf_counter_ns()
            tap.wait_s += (ended_ns - began_ns) * 1e-9
            if ended_ns - began_ns > LONG_WAIT_NS:
                recorder.waited_at_rest(began_ns, ended_ns)
            samples = self._count(batch)
            batches, before = rest.drawn.get(tap.loader_id, (0, 0))
            rest.drawn[tap.loader_id] = (batches + 1, before + (samples or 0))
            return batch
        finally:
            self._drawing = False

    def _draw(self, source: Any, following: Callable[[Any], Any], evaluating: bool) -> Any:
        taps, tap = self._taps, self._tap
        recorder = taps.recorder
        recorder.wake()
        changed = evaluating != taps.was_evaluating
        taps.was_evaluating = evaluating
        taps.waiting_for = tap
        before = recorder.switch(Activity.DATA_WAIT, WAITS[evaluating], Point.EVAL if changed else Point.NONE)
        first, self.first = self.first, False
        workers = _workers(source)
        timed = first or tap.batches < TIME_CPU_FIRST or tap.batches % TIME_CPU_EVERY == 0
        cpu = time.thread_time() if timed else 0.0
        began = tap.waiting_since_s = time.perf_counter()
        try:
            batch = following(source)
        except StopIteration:
            tap.waiting_since_s = None
            tap.restart_s += time.perf_counter() - began
            tap.in_pass = False
            taps.was_evaluating = recorder.eval_mode
            recorder.switch(
                before, PassEnded(tap.loader_id, evaluating, workers), Point.EVAL if evaluating else Point.NONE
            )
            raise
        except BaseException:
            # Often Ctrl-C, because nothing comes any more: that wait is the loader's, too, and costs no CPU time.
            cpu_s = time.thread_time() - cpu if timed else 0.0
            self._note_wait(first and workers > 0, time.perf_counter() - began, cpu_s)
            recorder.switch(before)
            raise
        if self.defers and taps.waiting_for is not tap:
            recorder.switch(before)
            self.passes_on = True
            return batch
        waited = time.perf_counter() - began
        self._note_wait(first and workers > 0, waited, time.thread_time() - cpu if timed else None)
        if not first and tap.arrived[0] == tap.batches:
            tap.draws.append((began - tap.arrived[1], waited))
        samples = self._count(batch)
        tap.arrived = tap.batches, began + waited
        doubtful = evaluating and taps.gradients()
        fact = BatchArrived(tap.loader_id, samples, evaluating, first, workers, doubtful)
        recorder.switch(before, fact, Point.NONE if evaluating else Point.BATCH)
        if evaluating:
            tap.eval_batches += 1
            recorder.evaluation.drew(sys._getframe(1), recorder.loop_frames.loop)
        else:
            taps.feeding, taps.unused = tap, True
            recorder.calibrate_if_asked(Point.BATCH)
        return batch

    def _ended_at_rest(self, began_ns: int, ended_ns: int, source: Any, exhausted: bool) -> None:
        """The pass has ended, or the wait by an exception: then it is the loader's, and cost no CPU time."""
        tap, recorder = self._tap, self._taps.recorder
        wait_s, workers = (ended_ns - began_ns) * 1e-9, _workers(source)
        if ended_ns - began_ns > LONG_WAIT_NS:
            recorder.waited_at_rest(began_ns, ended_ns, turnover=exhausted and workers > 0)
        recorder.wake()
        if exhausted:
            tap.restart_s += wait_s
            tap.in_pass = False
            recorder.switch(recorder.activity, PassEnded(tap.loader_id, False, workers))
        else:
            tap.wait_s += wait_s
            tap.timed_wait_s += wait_s

    def _note_wait(self, first: bool, wait_s: float, cpu_s: float | None) -> None:
        tap = self._tap
        tap.waiting_since_s = None
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
        samples = self._samples_of(batch)
        tap.batches += 1
        if samples is not None:
            tap.samples += samples
            tap.counted = True
        if tap.batches <= INSPECT_FIRST or tap.batches % INSPECT_EVERY == 0:
            tap.inspect(batch)
        return samples

    def _samples_of(self, batch: Any) -> int | None:
        tap = self._tap
        return count_samples(batch, tap.described.get("batch_size") or tap.asked_for, tap.last_batch_size)

    def _from_another_thread(self, source: Any, following: Callable[[Any], Any]) -> Any:
        """A prefetching thread of the user's draws: count the batch, but the training thread did not wait for it.

        One that evaluates beside the training takes none of its time.
        """
        batch, recorder = following(source), self._taps.recorder
        if recorder.active:
            samples = self._count(batch)
            if self._taps.evaluating(self._tap):
                self._tap.eval_batches += 1
            else:
                self._taps.feeding, self._taps.unused = self._tap, True
                self._taps.drawn_elsewhere = True
                recorder.note(BatchArrived(self._tap.loader_id, samples, False, False, 1))
        return batch


def _workers(source: Any) -> int:
    """How many workers the batches come from at this moment."""
    return int(getattr(source, "_num_workers", 0))


class TappedIterator(PassMeter):
    """An iterator with a meter. Everything it does not know itself it asks its source."""

    def __init__(self, taps: Drawing, tap: LoaderTap, source: Any) -> None:
        super().__init__(taps, tap)
        self.source = source

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() answers as it would without us
        return type(self.source)

    def __iter__(self) -> TappedIterator:
        return self

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __next__(self) -> Any:
        return self.draw(self.source, next)
