"""One loader: how it was made, its waits and batches so far, and the record of it."""

from __future__ import annotations

import builtins
import contextlib
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from fulltilt.recorder.loaders.batches import BatchFacts
from fulltilt.recorder.loaders.workers import WorkerTotals
from fulltilt.recorder.stacks.line_times import LineTimes
from fulltilt.records import LoaderRecord, WorkerRecord

# Where a data set may keep its samples; fewer objects than this take hardly any memory.
NAMED = (FunctionType, BuiltinFunctionType, MethodType, type)
COLLECTIONS, MANY_OBJECTS = (list, tuple, dict, set), 10_000


@dataclass
class LoaderStats:
    """One loader: how it was made, and what it has cost and brought so far."""

    loader_id: int
    loader: Callable[[], Any] = lambda: None  # a weak reference to it; of an iterable none is kept
    # How it was made.
    where: str | None = None
    given: tuple[str, ...] = ()
    made_by: str | None = None
    made_at: tuple[Any, ...] = ()  # a loader made there later, with as many samples, is the same one to its user
    constructed: int = 0
    described: dict[str, Any] = field(default_factory=dict)
    asked_for: int | None = None  # indices in each request, where there is no batch size: 1 without batching
    last_batch_size: int | None = None  # of a pass; None where it is full, or unknown
    # What it has given.
    passes: int = 0
    in_pass: bool = False
    trains: bool = False
    batches: int = 0
    eval_batches: int = 0
    samples: int = 0
    counted: bool = False
    facts: BatchFacts = field(default_factory=BatchFacts)
    # What the training thread has waited for it, and did meanwhile.
    wait_s: float = 0.0
    waiting_since_s: float | None = None
    timed_wait_s: float = 0.0
    timed_cpu_s: float = 0.0
    timed_helpers_cpu_s: float = 0.0
    first_wait_s: float = 0.0
    restart_s: float = 0.0
    sampler_lines: LineTimes = field(default_factory=LineTimes)
    fetch_lines: LineTimes = field(default_factory=LineTimes)  # where the training thread fetches itself
    # Its workers, and what each of those that were not forked got.
    workers: WorkerTotals | None = None
    pickled_workers: int = 0
    pickled_bytes: int = 0
    pickle_s: float = 0.0
    # What live tuning has put in force instead of the loader's own arguments.
    in_force: dict[str, Any] = field(default_factory=dict)
    serving_workers: int | None = None  # of the pool that serves now, on trial or in force

    def read_arguments(self, loader: Any) -> None:
        """Read the loader's arguments, on the thread that draws from it."""
        self.described, self.last_batch_size = describe(loader), _last_batch_size(loader)

    def retired(self) -> bool:
        """Whether this loader's passes are over: one made at the same place then takes its place."""
        return self.loader() is None or (self.passes > 0 and not self.in_pass)

    @property
    def serial(self) -> bool:
        """Whether the training thread fetches its batches itself."""
        serving = self.serving_workers
        return (self.described.get("num_workers") if serving is None else serving) == 0

    @property
    def waited_s(self) -> float:
        """The waits so far, with the one under way, which a loader that hangs never ends."""
        since_s = self.waiting_since_s
        return self.wait_s + (time.perf_counter() - since_s if since_s is not None else 0.0)

    @property
    def wait_cpu_s(self) -> float:
        """CPU time of the training thread inside next(), from the waits in which it was measured."""
        return self.wait_s * self.timed_cpu_s / self.timed_wait_s if self.timed_wait_s else 0.0

    @property
    def helpers_cpu_s(self) -> float:
        """CPU time of other threads of the process inside next(), likewise."""
        return self.wait_s * self.timed_helpers_cpu_s / self.timed_wait_s if self.timed_wait_s else 0.0

    def record(self, trained: bool) -> LoaderRecord:
        """The loader as a record."""
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
            wait_s=self.waited_s,
            wait_cpu_s=self.wait_cpu_s,
            helpers_cpu_s=self.helpers_cpu_s,
            first_wait_s=self.first_wait_s,
            restart_s=self.restart_s,
            pickled_workers=self.pickled_workers,
            pickled_bytes=self.pickled_bytes // max(self.pickled_workers, 1),
            pickle_s=self.pickle_s,
            sampler_lines=self.sampler_lines.top(),
            **{**self.facts.fields(), **self.described, **self.in_force},
        )

    def worker_record(self) -> WorkerRecord | None:
        """What its workers did; None without any, where the training thread was not seen fetching either."""
        if self.workers is not None:
            return self.workers.record(self.loader_id)
        lines = self.fetch_lines.top()
        if not lines:
            return None
        # The training thread is its own worker: what next() cost is what fetching cost.
        return WorkerRecord(
            loader_id=self.loader_id,
            processes=0,
            batches=self.batches,
            fetch_s=self.waited_s,
            fetch_cpu_s=self.wait_cpu_s,
            cpu_wait_s=None,
            idle_s=0.0,
            process_cpu_s=self.wait_cpu_s,
            read_bytes=None,
            lines=lines,
        )


def stored(owner: Any, name: str, otherwise: Any = None) -> Any:
    """An attribute as it is stored. A property or ``__getattr__`` may be the user's code: neither runs.

    In Python 3.11 and 3.12 whoever asks an object for its ``__dict__`` makes all its attributes slower from then on.
    """
    of_class = next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), None)
    if not hasattr(type(of_class), "__get__"):
        try:
            return object.__getattribute__(owner, name)
        except AttributeError:
            return otherwise
    attributes = _attributes(owner)
    if name not in attributes:
        attributes = next((vars(kind) for kind in type(owner).__mro__ if name in vars(kind)), {})
    found = attributes.get(name, otherwise)
    return otherwise if isinstance(found, property) else found


def _attributes(owner: Any) -> Mapping[str, Any]:
    try:
        return object.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:  # an object of a class with slots has none, nor has a plain list
        return {}


def describe(loader: Any) -> dict[str, Any]:
    """The arguments in force of a DataLoader, or of an object in place of one, as plain values."""
    public = stored(loader, "d", loader)  # fastai gives torch's iterators a wrapper of its loader
    dataset, sampler = _users_own(stored(public, "dataset")), stored(loader, "sampler")
    shuffle = {"RandomSampler": True, "SequentialSampler": False}.get(type(sampler).__name__)
    context: Any = stored(loader, "_DataLoader__multiprocessing_context") or stored(loader, "multiprocessing_context")
    workers = int(stored(loader, "num_workers", 0))
    return {
        "dataset": type(dataset).__name__,
        "dataset_len": length_of(dataset),
        "iterable": is_iterable(loader) and public is loader,
        "batch_size": _batch_size(public),
        "num_workers": workers,
        "prefetch_factor": stored(loader, "prefetch_factor") if workers else None,
        "pin_memory": bool(stored(loader, "pin_memory")),
        "persistent_workers": bool(stored(loader, "persistent_workers")),
        "shuffle": shuffle if public is loader else bool(stored(public, "shuffle")),
        "collate": _name(stored(loader, "collate_fn")),
        "start_method": context.get_start_method(allow_none=True) if context is not None else None,
        "objects": _most_objects(dataset),
    }


def _users_own(dataset: Any) -> Any:
    """The user's own data set, which the engine wraps in one of Fulltilt's."""
    return getattr(dataset, "samples", dataset) if type(dataset).__module__.startswith("fulltilt.") else dataset


def _most_objects(dataset: Any) -> str | None:
    """The attribute that holds most objects in a list, tuple, dict or set: ``self.paths, a list of 1,200,000``."""
    attributes = list(_attributes(dataset).items())  # at once: another thread may add one
    kept = [(len(value), name, value) for name, value in attributes if type(value) in COLLECTIONS]
    number, name, value = max(kept, key=lambda one: one[0], default=(0, "", None))
    return f"self.{name}, a {type(value).__name__} of {number:,}" if number >= MANY_OBJECTS else None


def is_iterable(loader: Any) -> bool:
    """Whether a loader's data set has no indices to draw."""
    return bool(stored(loader, "_dataset_kind", 0))  # torch's: 0 for a map, 1 for an iterable


def _batch_size(loader: Any) -> int | None:
    size = stored(loader, "batch_size")
    if size is None and (batches := stored(loader, "batch_sampler")) is not None:
        size = stored(batches, "batch_size")
    size = stored(loader, "bs") if size is None else size
    return size if isinstance(size, int) else None


def _last_batch_size(loader: Any) -> int | None:
    size, indices = _batch_size(loader), length_of(stored(loader, "sampler"))
    return (indices % size or None) if size and indices and not is_iterable(loader) else None


# --------------------------------------------------------------------------- lengths
# A data set or sampler of the user's may do anything when it is asked for its length: seek in a file, draw random
# numbers. So nobody asks but torch, and its answers are kept.

PLAIN_TYPES = ("builtins", "numpy", "torch")  # the modules of types whose length is safe to ask for
_answers: dict[int, tuple[weakref.ref[Any], int]] = {}


def keep_answers(module: Any) -> Callable[[], None]:
    """Keep the lengths that this module of torch's asks for by ``len()``. Returns what undoes that."""

    def asked(thing: Any) -> int:
        length, number = builtins.len(thing), id(thing)
        with contextlib.suppress(TypeError):  # it cannot be referenced weakly
            _answers[number] = weakref.ref(thing, lambda _: _answers.pop(number, None)), length
        return length

    module.len = asked
    return lambda: vars(module).pop("len", None)


def length_of(thing: Any) -> int | None:
    """The length of a data set or sampler, as far as it is known without asking the user's code; else None."""
    reference, answer = _answers.get(id(thing), (lambda: None, None))
    if thing is not None and reference() is thing:
        return answer
    module = type(thing).__module__
    if module in PLAIN_TYPES:
        with contextlib.suppress(TypeError):
            return len(thing)
    if not module.startswith("torch.utils.data."):
        return None
    for name in ("num_samples", "_num_samples"):
        if isinstance(number := stored(thing, name), int):
            return number
    parts = (stored(thing, name) for name in ("data_source", "indices", "dataset"))
    first = next((part for part in (*parts, *stored(thing, "tensors", ())) if part is not None), None)
    return None if first is None else length_of(first)


def _name(function: Any) -> str | None:
    return function.__qualname__ if isinstance(function, NAMED) else type(function).__name__
