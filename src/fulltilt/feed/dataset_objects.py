"""What a data set holds: random generators, open files that forked workers would share, attributes."""

from __future__ import annotations

import dis
import functools
import gc
import io
import itertools
import pickle
import random
import sqlite3
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from fulltilt.errors import UsageError
from fulltilt.feed.sample_store import memory_of

# Libraries whose open handles share a position or a lock with a forked process.
_HANDLES_OF = frozenset({"h5py", "lmdb", "sqlite3", "tables", "netCDF4", "tarfile", "zipfile", "socket"})
# Types of these libraries that are only data.
_RECORDS = frozenset({"TarInfo", "ZipInfo", "Row", "Empty", "Datatype"})
# Code that calls these opens its files in each process.
_KNOWS_ITS_PROCESS = frozenset({"getpid", "get_worker_info"})

# Bounds of the search: data sets hold lists of a million paths, models and modules.
_DEPTH, _OBJECTS, _LONG_LIST = 16, 20_000, 512
_NOT_SEARCHED = (str, bytes, int, float, complex, type(None), torch.Tensor, types.ModuleType)


def own_module(name: str | None) -> bool:
    """Whether a module is the user's, not Python's or an installed library's."""
    if name is None or name == "__main__":  # also under a launcher, whose file is then __main__
        return True
    if name.split(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or ("site-packages" not in file and "dist-packages" not in file)


def _inside(item: Any) -> list[Any]:
    """What ``item`` refers to; of a function what it uses, of a library's class nothing."""
    if isinstance(item, types.FunctionType):
        names = item.__code__.co_names
        used = [item.__globals__[name] for name in names if name in item.__globals__]
        modules = [module for module in used if isinstance(module, types.ModuleType) and own_module(module.__name__)]
        of_modules = [vars(module).get(name) for module in modules for name in names]
        return [*used, *of_modules, item.__closure__, item.__defaults__, item.__kwdefaults__]
    if isinstance(item, type) and not own_module(item.__module__):
        return []
    return item[:_LONG_LIST] if type(item) in (list, tuple) else gc.get_referents(item)[:_LONG_LIST]


def _reached(root: Any, inside: Callable[[Any], list[Any]] = _inside) -> Iterator[Any]:
    """Every object in the attributes, containers, methods, closures and used globals of ``root``, within bounds."""
    seen: dict[int, Any] = {}  # held, so that ids stay unique
    level = [root]
    for _ in range(_DEPTH):
        following: list[Any] = []
        for item in level:
            if isinstance(item, _NOT_SEARCHED) or id(item) in seen or len(seen) > _OBJECTS:
                continue
            seen[id(item)] = item
            yield item
            if type(item).__module__.partition(".")[0] not in ("random", "numpy"):
                following += inside(item)
        level = following


# --------------------------------------------------------------------------- open files


def refuse_shared_handle(dataset: Any, workers: int) -> None:
    """Raise UsageError where ``dataset`` holds an open file that its workers would share.

    Forked workers share its position, and would now and then read the wrong sample without an error.
    """
    parts = list(_reached(dataset)) if workers else []
    handle = next((item for item in parts if _is_open_handle(item)), None)
    if handle is None or any(_knows_its_process(item) for item in parts):
        return
    # An HDF5 data set has the name of its key; its file has the file name.
    opened = handle if hasattr(handle, "filename") or not hasattr(handle, "file") else handle.file
    name = getattr(opened, "filename", None) or getattr(opened, "name", None)
    key = "" if opened is handle else f", key {handle.name}"
    held = f"{type(handle).__name__}{f' of {name}{key}' if isinstance(name, str) else ''}"
    raise UsageError(
        f"the data set {type(dataset).__name__} holds an open {held} that {workers} workers would share",
        "Open it in __getitem__, once in each process, or have no workers.",
    )


def _knows_its_process(item: Any) -> bool:
    is_users = isinstance(item, types.FunctionType) and own_module(item.__module__)
    return is_users and not _KNOWS_ITS_PROCESS.isdisjoint(item.__code__.co_names)


def _is_open_handle(item: Any) -> bool:
    """Whether this is a file or a connection that is open for reading."""
    if isinstance(item, io.IOBase):
        if item.closed or isinstance(item, io.BytesIO | io.StringIO) or item in (sys.stdin, sys.stdout, sys.stderr):
            return False
        return item.readable() and "a" not in str(getattr(item, "mode", ""))
    library = type(item).__module__.partition(".")[0]
    if library not in _HANDLES_OF or isinstance(item, type) or type(item).__name__ in _RECORDS:
        return False
    is_open = getattr(item, "isopen", True)  # of PyTables a value, of netCDF4 a method
    closed = getattr(item, "closed", False) or getattr(item, "fp", item) is None
    closed = closed or not (is_open() if callable(is_open) else is_open)
    try:  # SQLite says it by an error alone
        return not closed and (library != "h5py" or bool(item)) and (library != "sqlite3" or item.total_changes >= 0)
    except sqlite3.ProgrammingError:
        return False


# --------------------------------------------------------------------------- random generators


class Generators:
    """The global generators of random, numpy and torch, and those that ``root`` refers to."""

    def __init__(self, root: Any = None) -> None:
        numpy = sys.modules.get("numpy")
        every = [random.random.__self__, torch.default_generator]  # type: ignore[attr-defined]
        every += [] if numpy is None else [numpy.random.mtrand._rand]
        every += [item for item in _reached(root) if _is_generator(item)]
        self._every = list({id(generator): generator for generator in every}.values())

    def mark(self) -> bytes:
        """Bytes that change whenever a generator is drawn from."""
        return pickle.dumps([_state(generator) for generator in self._every])

    def seed(self, seed: int) -> None:
        """Seed every generator from the 32-bit ``seed``; forked workers would draw the same numbers otherwise."""
        for position, generator in enumerate(self._every):
            number = seed if position < 3 else (seed + 0x9E3779B9 * (position + 1)) & 0xFFFFFFFF
            if isinstance(generator, torch.Generator):
                generator.manual_seed(number)
            elif hasattr(generator, "bit_generator"):
                generator.bit_generator.state = type(generator.bit_generator)(number).state
            else:
                generator.seed(number)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Restore every generator at the end, except in a worker, where it would only cost time."""
        if torch.utils.data.get_worker_info() is not None:
            yield
            return
        before = [_state(generator) for generator in self._every]
        try:
            yield
        finally:
            for generator, state in zip(self._every, before, strict=True):
                if isinstance(generator, torch.Generator):
                    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
                elif hasattr(generator, "bit_generator"):
                    generator.bit_generator.state = state
                else:
                    generator.__setstate__(state)


def generators_of_samples(dataset: Any, index: int) -> Generators:
    """The generators that ``dataset`` draws from in this process, also those that its first sample makes.

    To be asked after a fork, as a worker has instances of its own.
    """
    with Generators(dataset).untouched(), suppress(Exception):
        dataset[index]
    return Generators(dataset)


def _is_generator(item: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if isinstance(item, torch.Generator):
        return item.device.type == "cpu"
    if isinstance(item, random.Random):
        return not isinstance(item, random.SystemRandom)
    return numpy is not None and isinstance(item, numpy.random.RandomState | numpy.random.Generator)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return bytes(memory_of(state))
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.__getstate__()


# --------------------------------------------------------------------------- attributes

# Of each object reached, itself (held, so that ids stay unique) and what it holds by name, each with its mark.
Attributes = list[tuple[Any, dict[Any, tuple[Any, Any]]]]
_PLAIN = (bool, int, float, str, bytes, type(None))
# Larger values are not hashed in every epoch: bytes of all arrays together, items of one list.
_DIGEST_BYTES, _DIGEST_ITEMS = 64 * 1024**2, 100_000
# Of the standard library's objects, those that only hold what is given to them; a logger or a path changes by itself.
_HOLDERS = frozenset({"builtins", "collections", "types", "argparse", "functools", "configparser"})


def attributes(dataset: Any) -> Attributes:
    """What the data set refers to, also within other objects, each with a mark of its identity and content.

    Within the bounds of the search, so that it takes some tenths of a second at most; outer objects come first.
    """
    held: dict[int, dict[Any, Any]] = {}
    found = 0

    def inside(item: Any) -> list[Any]:
        nonlocal found
        held[id(item)] = _held(item) if found < _OBJECTS else {}
        found += len(held[id(item)])
        return list(held[id(item)].values())

    reached = list(_reached([dataset], inside))
    marks, room = dict[int, Any](), [_DIGEST_BYTES]
    return [
        (item, {name: (value, _mark(value, marks, room)) for name, value in held.get(id(item), {}).items()})
        for item in reached
    ]


def changed_attribute(before: Attributes, now: Attributes) -> str | None:
    """The name of the first attribute that differs ``now``, if any, outer ones first."""
    dataset = now[0][0][0]
    for (_, old), (item, new) in zip(before, now, strict=False):
        for name in {**old, **new}:
            if old.get(name, ())[1:] != new.get(name, ())[1:]:
                inner = "" if item is dataset else f" in {getattr(item, '__name__', type(item).__name__)}"
                return f"{name}{inner}"
    return None


def _held(item: Any) -> dict[Any, Any]:
    """The attributes and items of ``item`` by name, and without one by position; of the libraries' code nothing."""
    if _is_plain(item):  # its mark has all of it
        return {}
    if isinstance(item, types.FunctionType | type):
        if not own_module(item.__module__):
            return {}
        return _used_by(item) if isinstance(item, types.FunctionType) else {**vars(item), "bases": item.__bases__}
    library = type(item).__module__.partition(".")[0]
    if library in _HANDLES_OF or (library in sys.stdlib_module_names and library not in _HOLDERS):
        return {}
    named = getattr(item, "__dict__", {})
    if type(item).__name__ == "_lru_cache_wrapper":  # it also refers to what it has kept
        return dict(named)
    if isinstance(item, dict):
        return {**named, **dict(itertools.islice(item.items(), _LONG_LIST))}
    # Whether an object refers to its attributes or to the dict of them depends on what was done with it before.
    others = {id(named), *map(id, named.values())}
    inside = enumerate(_inside(item))
    return {**{number: value for number, value in inside if id(value) not in others}, **named}


def _used_by(function: types.FunctionType) -> dict[Any, Any]:
    """The globals, variables of outer functions and defaults that ``function`` uses."""
    code, known = function.__code__, function.__globals__
    used = {name: known[name] for name in _loaded_globals(code) if name in known}
    for module in list(used.values()):
        if isinstance(module, types.ModuleType) and own_module(module.__name__):
            used |= {f"{module.__name__}.{name}": vars(module)[name] for name in code.co_names if name in vars(module)}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    used |= {name: value for name, cell in cells for value in gc.get_referents(cell)}
    return {**used, "defaults": function.__defaults__, "keyword defaults": function.__kwdefaults__, **vars(function)}


@functools.lru_cache(4096)
def _loaded_globals(code: types.CodeType) -> tuple[str, ...]:
    """Without the attributes that ``co_names`` has too: the script's ``epoch`` is not a data set's ``self.epoch``."""
    return tuple({step.argval: None for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"})


def _is_plain(value: Any) -> bool:
    """Whether this is a collection of numbers and texts alone, short enough to be hashed in every epoch."""
    known = isinstance(value, list | tuple | dict | set) and type(value).__module__ in ("builtins", "collections")
    if not known or len(value) > _DIGEST_ITEMS:
        return False
    return all(isinstance(item, _PLAIN) for item in (value.values() if isinstance(value, dict) else value))


def _mark(value: Any, marks: dict[int, Any], room: list[int]) -> Any:
    """The mark of a value, looked up in ``marks`` first; ``room`` is left for the content of arrays."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in marks:
        return marks[id(value)]
    content = None
    if isinstance(value, torch.Tensor):
        content = None if value.is_inference() else value._version  # they do not count their changes
    elif type(value).__module__ == "numpy" and getattr(value, "nbytes", _DIGEST_BYTES) < room[0]:
        room[0] -= value.nbytes
        content = zlib.crc32(value.tobytes())
    elif isinstance(value, list | tuple | dict | set):
        content = zlib.crc32(repr(value).encode("utf-8", "backslashreplace")) if _is_plain(value) else len(value)
    marks[id(value)] = id(value), content
    return marks[id(value)]
