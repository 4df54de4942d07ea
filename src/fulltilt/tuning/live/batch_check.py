"""Checks whether other workers would make the same batches. Where not, a loader is left alone, with a reason in words.

First by the parts of the loader; then two workers make batches again that the script has had, three times each. Where
those differ among each other, the data set draws random numbers; where they agree but differ from the script's, it
behaves differently in a worker. Only generators that torch seeds anew in each worker may be drawn from in a script
without workers: copies of another one, or of an unseen state, repeat themselves. What only a few samples do is found
later: a worker that serves such a script refuses a batch that changed its data set.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dis
import hashlib
import io
import math
import multiprocessing
import pickle
import random
import signal
import sys
import threading
import types
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, zip_longest
from multiprocessing import managers, queues, sharedctypes
from operator import attrgetter, is_
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

from fulltilt.recorder.user_code import owner
from fulltilt.tuning.live.loader_pool import IndexQueue, LoaderPool, copy_of, start_method

# Several, since results that depend on the number of threads agree now and then.
MOST_BATCHES = 3
CHECKING_WORKERS = 2
TIMES = 3
# Of a data set's state; pickling more would take longer than a step.
MOST_STATE_BYTES = 32 << 20
LARGE_ARRAY_BYTES = 1 << 20
# Of its large arrays, half a millisecond for each MiB; beyond this, evenly spaced elements.
MOST_ARRAY_BYTES = 64 << 20
MOST_SPACED_ELEMENTS = 1 << 16  # each may lie on a page of its own
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
            known, own = _global_generators(), AttributeWatch((loader.dataset, loader.collate_fn)).generators
            if self._state is None:
                self._look_at_data_set(loader)
            marks, own_marks = ([(one, _mark_of(one)) for one in each] for each in (known, own))
            self._before = (marks, own_marks, file_positions(), bytes_written())

    def fetched(self, indices: Any, batch: Any) -> None:
        """Called with that batch: keeps its digest, since training may change the batch in place."""
        if self._before is not None:
            written = bytes_written()
            generators, own, positions, written_before = self._before
            drawn = [_mark_of(one) != before for one, before in generators]
            self._is_random = self._is_random or any(drawn)
            self.draws_from_torch = self.draws_from_torch or drawn[0]
            if any(_mark_of(one) != before for one, before in own):
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


# ---------------------------------------------------------------------- the state that a fetch depends on


class _Enough(Exception):  # noqa: N818 - no error
    pass


class _Digest:
    """A file that only hashes what is written; raises _Enough after ``most_bytes``."""

    def __init__(self, most_bytes: float) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self.left = most_bytes

    def write(self, data: Any) -> None:
        """Hash it."""
        self.hash.update(data)
        self.left -= len(data)
        if self.left < 0:
            raise _Enough


class Pickled(pickle.Pickler):
    """Pickles to a hash, and finds what cannot be sent to a process: open files, connections, thread pools.

    The ``digest`` of a batch covers every bit. That of a data set leaves out code and random generators, which forked
    workers have anyway, and includes the values that its code keeps in classes and modules. ``unusual`` names a tensor
    that a worker would not send as it is.
    """

    def __init__(self, item: Any, is_batch: bool = True) -> None:
        # Not to itself: a garbage collection on another thread would free the tensors of such a reference cycle.
        self._written = _Digest(math.inf if is_batch else MOST_STATE_BYTES)
        super().__init__(self._written, protocol=pickle.HIGHEST_PROTOCOL)
        self._is_batch = is_batch
        self._array_bytes_left = MOST_ARRAY_BYTES
        self._code: list[types.FunctionType | type] = []  # code of the data set
        self.tensors = 0
        self.unusual: str | None = None
        self.problem: str | None = None
        try:
            self.dump(item)
        except _Enough:
            pass
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
        # The data set's own state leaves none of its bytes to these.
        self._written.left = MOST_STATE_BYTES
        for value in shared_state(self._code):
            with contextlib.suppress(Exception):
                self.dump(value)

    @property
    def digest(self) -> bytes:
        """The hash of all that was pickled."""
        return self._written.hash.digest()

    def reducer_override(self, item: Any) -> Any:
        """Replace what is not to be pickled as it is by a plain value."""
        numpy = sys.modules.get("numpy")
        if isinstance(item, torch.Tensor) and item.layout == torch.strided:
            return self._tensor(item)
        is_array = numpy is not None and isinstance(item, numpy.ndarray) and not item.dtype.hasobject
        if is_array and (self._is_batch or item.nbytes <= LARGE_ARRAY_BYTES):
            return tuple, ((item.dtype.str, item.shape, item.tobytes()),)
        if self._is_batch or any(item is plain for plain in (int, list, tuple)):
            return NotImplemented
        if is_array:
            return int, (self._checksum(numpy, item),)
        if isinstance(item, types.FunctionType):
            self._code.append(item)
            cells = [cell.cell_contents for cell in item.__closure__ or () if _is_filled(cell)]
            return list, ([*cells, item.__defaults__, item.__kwdefaults__],)
        if isinstance(item, (*_LEFT_OUT, *_generator_types())) or (isinstance(item, io.IOBase) and item.closed):
            return int, ()
        self._code.append(type(item))
        how = type(item).__getstate__
        if isinstance(how, types.FunctionType) and owner(_file_of(how)) == "user" and hasattr(item, "__dict__"):
            return object, (), vars(item)  # that function may close what the training process still reads from
        return NotImplemented

    def _checksum(self, numpy: Any, array: Any) -> int:
        """Of a large array; its size where nothing can be written to it, or where workers would share what is."""
        is_shared = isinstance(array, numpy.memmap) or isinstance(array.base, numpy.memmap)
        if is_shared or not (array.flags.writeable and array.flags.forc and self._array_bytes_left > 0):
            return int(array.nbytes)
        is_whole = array.nbytes <= self._array_bytes_left
        step = 1 if is_whole else math.ceil(array.size / MOST_SPACED_ELEMENTS)
        data = numpy.ascontiguousarray(array.ravel(order="K")[::step])
        self._array_bytes_left -= data.nbytes
        return zlib.crc32(data.view(numpy.uint8))

    def _tensor(self, item: torch.Tensor) -> Any:
        self.tensors += 1
        if item.device.type != "cpu" or (item.requires_grad and not item.is_leaf):
            self.unusual = f"a tensor on {item.device}{', with its gradient' if item.requires_grad else ''}"
        if not self._is_batch:  # its version: how often it was written to
            return int, (0 if item.is_inference() else item._version,)
        held = item.detach().cpu().contiguous()
        data = ctypes.string_at(held.data_ptr(), held.numel() * held.element_size())
        return tuple, ((str(item.dtype), tuple(item.shape), data),)


def shared_state(code: list[types.FunctionType | type]) -> list[Any]:
    """Values in the classes and modules that the script's own code names: each process changes only its own.

    Plain ones, and arrays.
    """
    numpy = sys.modules.get("numpy")
    noted = (*_PLAIN, *([] if numpy is None else [numpy.ndarray]))
    found: list[Any] = []
    seen: set[int] = set()
    while code:
        one = code.pop()
        if id(one) in seen or owner(_file_of(one)) != "user":
            continue
        seen.add(id(one))
        if isinstance(one, type):
            held = [value for name, value in vars(one).items() if not name.startswith("__")]
            code.extend(one.__bases__)
            # Special methods, too: the loader calls them.
            made_of = [getattr(value, "__func__", value) for value in vars(one).values()]
        else:
            held = made_of = [one.__globals__[name] for name in _names(one.__code__) if name in one.__globals__]
        code.extend(value for value in made_of if isinstance(value, types.FunctionType))
        found.extend(value for value in held if isinstance(value, noted))
    return found


def _file_of(code: types.FunctionType | type) -> str:
    if isinstance(code, types.FunctionType):
        return code.__code__.co_filename
    nameless = "<stdin>" if code.__module__ == "__main__" else "<built in>"  # a notebook, a module in C
    return getattr(sys.modules.get(code.__module__), "__file__", None) or nameless


def _names(code: types.CodeType) -> Iterator[str]:
    """The globals that code reads or writes; ``co_names`` would include attributes of the same name."""
    yield from (str(step.argval) for step in dis.get_instructions(code) if step.opname.endswith(("_GLOBAL", "_NAME")))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


WIDEST, MOST_PLACES = 64, 256
# Of all short containers; together these keep a look below 40 us.
MOST_ELEMENTS, MOST_MARKS, MOST_SMALL_ARRAY_BYTES = 192, 32, 4 << 10
# A place where values are assigned: gives the values, and gives their names.
Place = tuple[Callable[[], Iterable[Any]], Callable[[], Iterable[str]]]


class AttributeWatch:
    """Sees whether a data set changes.

    Looks at what is assigned: attributes of the data set, of what it holds and of their classes, and the globals that
    their code names; and, of what the script's own code holds, at elements of short containers and small arrays, at the
    length of others and at what is written to tensors. ``generators`` are the random generators among all these
    that no module has for all, ``shared`` is the name of an object that it shares with other processes.
    """

    def __init__(self, dataset: Any) -> None:
        self._places: list[Place] = []
        self._marks: list[tuple[str, Callable[[], Any], Any]] = []
        self.generators: list[Any] = []
        self.shared: str | None = None
        self._elements = 0
        numpy = sys.modules.get("numpy")
        generators, global_generators = _generator_types(), _global_generators()
        left: deque[tuple[str, Any, bool]] = deque([("", dataset, False)])
        seen = set[int]()
        while left and len(self._places) < MOST_PLACES:
            name, item, own = left.popleft()
            if id(item) in seen or isinstance(item, types.ModuleType):
                continue
            seen.add(id(item))
            kind = item if isinstance(item, type | types.FunctionType) else type(item)
            is_users = owner(_file_of(kind)) == "user"
            if isinstance(item, generators):
                if not any(item is known for known in global_generators):
                    self.generators.append(item)
            elif isinstance(item, _SHARED):
                self.shared = kind.__name__
            elif isinstance(item, _CONTAINERS):
                if own:
                    self._note_container(name, item)
                values = dict.values(item) if isinstance(item, dict) else item
                left += [(name, value, own) for value in islice(values, WIDEST)]
            elif isinstance(item, torch.Tensor):
                if own and not item.is_inference():
                    self._mark(name, partial(attrgetter("_version"), item))
            elif numpy is not None and isinstance(item, numpy.ndarray):
                if own and item.nbytes <= MOST_SMALL_ARRAY_BYTES:
                    self._mark(name, item.tobytes)
            elif isinstance(item, types.FunctionType):
                if is_users:
                    names = tuple(name for name in _names(item.__code__) if name in item.__globals__)
                    self._places.append((partial(map, item.__globals__.get, names), partial(iter, names)))
                    left += [(name, item.__globals__[name], True) for name in names]
                    cells = zip(item.__code__.co_freevars, item.__closure__ or (), strict=True)
                    left += [(name, cell.cell_contents, True) for name, cell in cells if _is_filled(cell)]
            elif isinstance(item, _AROUND_FUNCTIONS):
                parts = ("__func__", "__self__", "func", "args", "keywords")
                left += [(name, getattr(item, part), own) for part in parts if hasattr(item, part)]
            elif hasattr(item, "__dict__") and (is_users or not isinstance(item, type)):
                held = vars(item)
                self._places.append((held.values, held.keys))
                left += [(name, value, is_users) for name, value in held.items()]
                left += [(name, each, is_users) for each in (kind, *getattr(kind, "__bases__", ()))]
        self._names, self._values = self._names_now(), self._values_now()

    def _note_container(self, name: str, item: Any) -> None:
        if isinstance(item, tuple):
            return
        if isinstance(item, set) or self._elements + len(item) > MOST_ELEMENTS or len(item) > WIDEST:
            self._mark(name, partial(len, item))
        else:
            self._elements += len(item) + 1
            look: Callable[[Any], Iterable[Any]] = dict.values if isinstance(item, dict) else iter
            self._places.append((partial(look, item), lambda: [name] * len(item)))

    def _mark(self, name: str, look: Callable[[], Any]) -> None:
        if len(self._marks) < MOST_MARKS:
            self._marks.append((name, look, look()))

    def changed(self) -> str | None:
        """The name of what has changed since; None where nothing has. Runs for every batch."""
        values = self._values_now()
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            if (names := self._names_now()) != self._names:
                pairs = zip_longest(names, self._names)
                now, before = next((now, before) for now, before in pairs if now != before)
                return (now if len(names) >= len(self._names) else before) or "deleted"
            for name, value, before in zip(names, values, self._values, strict=True):
                if value is not before and not _is_same(value, before):
                    return name
            self._values = values
        return next((name for name, look, before in self._marks if look() != before), None)

    def _values_now(self) -> list[Any]:
        return list(chain.from_iterable([values() for values, _ in self._places]))

    def _names_now(self) -> list[str]:
        return list(chain.from_iterable([names() for _, names in self._places]))


def _is_same(now: Any, before: Any) -> bool:
    """Whether a value was assigned again that is the same as before."""
    if now is before or type(now) is not type(before):
        return now is before
    if type(now) in (tuple, list):
        return len(now) == len(before) and all(map(_is_same, now, before))
    return type(now) in (int, float, str, bytes) and repr(now) == repr(before)


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
        generators = _global_generators() if self._exact else []
        if self._exact or not self._may_draw_from_own:
            generators += self._attributes.generators
        self._generators = [(generator, _mark_of(generator)) for generator in generators]

    def collate(self, samples: Any) -> Any:
        """The batch; raises UnfitForWorkersError where more was done than to make it."""
        batch = self._collate(samples)
        if (name := self._attributes.changed()) is not None:
            raise UnfitForWorkersError(
                f"its data set changes while it makes a batch ({name}), which workers would keep to themselves"
            )
        if any(_mark_of(generator) != before for generator, before in self._generators):
            raise UnfitForWorkersError(DRAWS if self._exact else OWN_DRAWS)
        return batch


_PLAIN = (
    *(int, float, complex, str, bytes, bytearray, list, tuple, dict, set),
    *(deque, array, torch.Tensor),
)
_AROUND_FUNCTIONS = (partial, types.MethodType, staticmethod, classmethod)
_CONTAINERS = (list, tuple, dict, set, deque)
# multiprocessing's: proxies of a Manager, Value and Array, queues.
_SHARED = (managers.BaseProxy, sharedctypes.SynchronizedBase, queues.Queue, queues.SimpleQueue)
_LEFT_OUT = (
    *(type, types.ModuleType, types.BuiltinFunctionType, weakref.ReferenceType),
    *(type(threading.Lock()), type(threading.RLock())),
)


def _generator_types() -> tuple[type, ...]:
    of_numpy = getattr(sys.modules.get("numpy"), "random", None)
    numpys = () if of_numpy is None else (of_numpy.Generator, of_numpy.RandomState, of_numpy.BitGenerator)
    return (random.Random, torch.Generator, *numpys)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _global_generators() -> list[Any]:
    """The generators of the modules that have one of their own, torch's first."""
    of_numpy = getattr(sys.modules.get("numpy"), "random", None)
    return [torch.default_generator, random._inst, *([] if of_numpy is None else [of_numpy.mtrand._rand])]


def _mark_of(generator: Any) -> Any:
    """What changes with every draw."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        _, words, gauss = generator.getstate()
        return words[0], words[-1], gauss  # the last one counts the words that were drawn
    if hasattr(generator, "get_state"):  # a RandomState, which keeps the second of two Gaussian numbers itself
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(getattr(generator, "bit_generator", generator).state)


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
        return "an IterableDataset decides for each worker what it gives: another number may change the batches"
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
