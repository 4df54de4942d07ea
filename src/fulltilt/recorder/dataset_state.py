"""What a batch and a data set hold: digests to compare, and a watch over changes of the data set."""

from __future__ import annotations

import contextlib
import ctypes
import dis
import hashlib
import io
import math
import pickle
import random
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
from typing import Any

import torch

from fulltilt.recorder.user_code import owner

# ---------------------------------------------------------------------- random generators


def generator_types() -> tuple[type, ...]:
    """The types of random generators; NumPy's once it is imported."""
    of_numpy = getattr(sys.modules.get("numpy"), "random", None)
    numpys = () if of_numpy is None else (of_numpy.Generator, of_numpy.RandomState, of_numpy.BitGenerator)
    return (random.Random, torch.Generator, *numpys)


def global_generators() -> list[Any]:
    """The generators of the modules that have one of their own, torch's first."""
    of_numpy = getattr(sys.modules.get("numpy"), "random", None)
    return [torch.default_generator, random._inst, *([] if of_numpy is None else [of_numpy.mtrand._rand])]


def mark_of(generator: Any) -> Any:
    """What changes with every draw."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())
    if isinstance(generator, random.Random):
        _, words, gauss = generator.getstate()
        return words[0], words[-1], gauss  # the last one counts the words that were drawn
    if hasattr(generator, "get_state"):  # a RandomState, which keeps the second of two Gaussian numbers itself
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(getattr(generator, "bit_generator", generator).state)


# ---------------------------------------------------------------------- the script's own code


def is_filled(cell: types.CellType) -> bool:
    """Whether a variable of an outer function has a value by now."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


Code = types.FunctionType | type | types.ModuleType


def is_users(code: Code) -> bool:
    """Whether this is code of the script, not of a library."""
    if isinstance(code, types.FunctionType):
        return owner(code.__code__.co_filename) == "user"
    module = code.__name__ if isinstance(code, types.ModuleType) else code.__module__
    nameless = "<stdin>" if module == "__main__" else "<built in>"  # a notebook, a module in C
    return owner(getattr(sys.modules.get(module), "__file__", None) or nameless) == "user"


def global_names(code: types.CodeType) -> Iterator[str]:
    """The globals that code reads or writes; ``co_names`` would include attributes of the same name."""
    yield from (str(step.argval) for step in dis.get_instructions(code) if step.opname.endswith(("_GLOBAL", "_NAME")))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from global_names(inner)


_PLAIN = (
    *(int, float, complex, str, bytes, bytearray, list, tuple, dict, set),
    *(deque, array, torch.Tensor),
)


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
        if id(one) in seen or not is_users(one):
            continue
        seen.add(id(one))
        if isinstance(one, type):
            held = [value for name, value in vars(one).items() if not name.startswith("__")]
            code.extend(one.__bases__)
            # Special methods, too: the loader calls them.
            made_of = [getattr(value, "__func__", value) for value in vars(one).values()]
        else:
            held = made_of = [one.__globals__[name] for name in global_names(one.__code__) if name in one.__globals__]
        code.extend(value for value in made_of if isinstance(value, types.FunctionType))
        found.extend(value for value in held if isinstance(value, noted))
    return found


# ---------------------------------------------------------------------- digests

# Of a data set's state; pickling more would take longer than a step.
MOST_STATE_BYTES = 32 << 20
LARGE_ARRAY_BYTES = 1 << 20
# Of its large arrays, half a millisecond for each MiB; beyond this, evenly spaced elements.
MOST_ARRAY_BYTES = 64 << 20
MOST_SPACED_ELEMENTS = 1 << 16  # each may lie on a page of its own
_LEFT_OUT = (
    *(type, types.ModuleType, types.BuiltinFunctionType, weakref.ReferenceType),
    *(type(threading.Lock()), type(threading.RLock())),
)


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
            cells = [cell.cell_contents for cell in item.__closure__ or () if is_filled(cell)]
            return list, ([*cells, item.__defaults__, item.__kwdefaults__],)
        if isinstance(item, (*_LEFT_OUT, *generator_types())) or (isinstance(item, io.IOBase) and item.closed):
            return int, ()
        self._code.append(type(item))
        how = type(item).__getstate__
        if isinstance(how, types.FunctionType) and is_users(how) and hasattr(item, "__dict__"):
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


# ---------------------------------------------------------------------- changes of a data set

WIDEST, MOST_PLACES = 64, 256
# Of all short containers; together these keep a look below 40 us.
MOST_ELEMENTS, MOST_MARKS, MOST_SMALL_ARRAY_BYTES = 192, 32, 4 << 10
# A place where values are assigned: gives the values, and gives their names.
Place = tuple[Callable[[], Iterable[Any]], Callable[[], Iterable[str]]]
# A name, what it names, and whether the script's own code holds that.
Part = tuple[str, Any, bool]
_AROUND_FUNCTIONS = (partial, types.MethodType, staticmethod, classmethod)
_CONTAINERS = (list, tuple, dict, set, deque)
# multiprocessing's: proxies of a Manager, Value and Array, queues.
_SHARED = (managers.BaseProxy, sharedctypes.SynchronizedBase, queues.Queue, queues.SimpleQueue)


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
        left: deque[Part] = deque([("", dataset, False)])
        seen = set[int]()
        while left and len(self._places) < MOST_PLACES:
            name, item, own = left.popleft()
            if id(item) not in seen and not isinstance(item, types.ModuleType):
                seen.add(id(item))
                left += self._note(name, item, own)
        self._names, self._values = self._names_now(), self._values_now()

    def _note(self, name: str, item: Any, own: bool) -> list[Part]:
        """Note what can be assigned in one object; returns what it holds. ``own``: the script's own code holds it."""
        numpy = sys.modules.get("numpy")
        if isinstance(item, generator_types()):
            if not any(item is known for known in global_generators()):
                self.generators.append(item)
        elif isinstance(item, _SHARED):
            self.shared = type(item).__name__
        elif isinstance(item, _CONTAINERS):
            if own:
                self._note_container(name, item)
            values = dict.values(item) if isinstance(item, dict) else item
            return [(name, value, own) for value in islice(values, WIDEST)]
        elif isinstance(item, torch.Tensor):
            if own and not item.is_inference():
                self._mark(name, partial(attrgetter("_version"), item))
        elif numpy is not None and isinstance(item, numpy.ndarray):
            if own and item.nbytes <= MOST_SMALL_ARRAY_BYTES:
                self._mark(name, item.tobytes)
        elif isinstance(item, types.FunctionType):
            return self._note_globals(item) if is_users(item) else []
        elif isinstance(item, _AROUND_FUNCTIONS):
            parts = ("__func__", "__self__", "func", "args", "keywords")
            return [(name, getattr(item, part), own) for part in parts if hasattr(item, part)]
        elif hasattr(item, "__dict__"):
            return self._note_attributes(name, item)
        return []

    def _note_globals(self, function: types.FunctionType) -> list[Part]:
        """The globals that a function names, also in modules of the script, and variables of functions around it."""
        code, known = function.__code__, function.__globals__
        names = tuple(name for name in global_names(code) if name in known)
        modules = [known[name] for name in names if isinstance(known[name], types.ModuleType)]
        own_modules = [module for module in modules if is_users(module)]
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        inner = [(name, cell.cell_contents, True) for name, cell in cells if is_filled(cell)]
        for held, used in ((known, names), *((vars(module), code.co_names) for module in own_modules)):
            there = tuple(name for name in used if name in held)
            self._places.append((partial(map, held.get, there), partial(iter, there)))
            inner += [(name, held[name], True) for name in there]
        return inner

    def _note_attributes(self, name: str, item: Any) -> list[Part]:
        kind = item if isinstance(item, type) else type(item)
        own = is_users(kind)
        if isinstance(item, type) and not own:
            return []
        held = vars(item)
        self._places.append((held.values, held.keys))
        classes = (kind, *getattr(kind, "__bases__", ()))
        return [*((inner, value, own) for inner, value in held.items()), *((name, each, own) for each in classes)]

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
