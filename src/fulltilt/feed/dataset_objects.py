"""What a data set holds: random generators, open files that forked workers would share, and whether it changes."""

from __future__ import annotations

import gc
import io
import random
import sqlite3
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from fulltilt.errors import UsageError
from fulltilt.feed.sample_store import memory_of
from fulltilt.recorder.dataset_state import AttributeWatch, Pickled, global_generators, is_users, mark_of

# Libraries whose open handles share a position or a lock with a forked process.
_HANDLES_OF = frozenset({"h5py", "lmdb", "sqlite3", "tables", "netCDF4", "tarfile", "zipfile", "socket"})
# Types of these libraries that are only data.
_RECORDS = frozenset({"TarInfo", "ZipInfo", "Row", "Empty", "Datatype"})
# Code that calls these opens its files in each process.
_KNOWS_ITS_PROCESS = frozenset({"getpid", "get_worker_info"})

# Bounds of the search: data sets hold lists of a million paths, models and modules.
_DEPTH, _OBJECTS, _LONG_LIST = 16, 20_000, 512
_NOT_SEARCHED = (str, bytes, int, float, complex, type(None), torch.Tensor, types.ModuleType)


def _inside(item: Any) -> list[Any]:
    """What ``item`` refers to; of a function what it uses, of a library's class nothing."""
    if isinstance(item, types.FunctionType):
        names = item.__code__.co_names
        used = [item.__globals__[name] for name in names if name in item.__globals__]
        modules = [module for module in used if isinstance(module, types.ModuleType) and is_users(module)]
        of_modules = [vars(module).get(name) for module in modules for name in names]
        return [*used, *of_modules, item.__closure__, item.__defaults__, item.__kwdefaults__]
    if isinstance(item, type) and not is_users(item):
        return []
    return item[:_LONG_LIST] if type(item) in (list, tuple) else gc.get_referents(item)[:_LONG_LIST]


def _reached(root: Any) -> Iterator[Any]:
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
                following += _inside(item)
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
    own = isinstance(item, types.FunctionType) and is_users(item)
    return own and not _KNOWS_ITS_PROCESS.isdisjoint(item.__code__.co_names)


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
        every = [*global_generators(), *(item for item in _reached(root) if _is_generator(item))]
        self._every = list({id(generator): generator for generator in every}.values())

    def marks(self) -> list[Any]:
        """What changes whenever a generator is drawn from."""
        return [mark_of(generator) for generator in self._every]

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


# --------------------------------------------------------------------------- what it holds


class HeldState:
    """What a data set holds at one moment."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._watch = dataset, None
        with suppress(Exception):  # some objects raise errors when they are looked at
            AttributeWatch(dataset)  # a look gives a BytesIO a place for attributes, which is pickled, too
        self._digest = Pickled(dataset, is_batch=False).digest
        with suppress(Exception):
            self._watch = AttributeWatch(dataset)  # last: pickling leaves a note in a class

    def change(self) -> str | None:
        """The first thing that has changed since, in words; None where nothing has."""
        with suppress(Exception):
            if self._watch is not None and (name := self._watch.changed()) is not None:
                return f"the data set's attribute {name}"
        same = Pickled(self._dataset, is_batch=False).digest == self._digest
        return None if same else "what the data set holds"
