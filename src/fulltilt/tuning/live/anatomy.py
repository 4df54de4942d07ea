"""What a data set is made of and uses, as far as a bounded walk sees: what has changed, and what must not be forked."""

from __future__ import annotations

import array
import logging
import sys
import types
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

import torch

from fulltilt.feed.handles import is_crew, is_open_handle
from fulltilt.tuning.live.reach import is_users, methods_of, used_by

DEEPEST = 8
MOST_PARTS = 4000
# A longer container, and an array, count by a hash of what they hold, if that is not too much to read.
LONG = 200
MOST_ITEMS = 2_000_000
MOST_BYTES = 64 << 20
PLAIN = (str, bytes, int, float, complex, bool, type(None), PurePath)
SEQUENCES = (list, tuple, deque)
WRAPPED = (staticmethod, classmethod)
# Not looked into: what they hold changes with use, and no sample depends on it.
CLOSED = (types.ModuleType, types.BuiltinFunctionType, type, torch.Tensor, logging.Logger, logging.Handler)


@dataclass(frozen=True)
class Anatomy:
    """``parts`` by their path; ``whole``: a change could not be missed.

    ``handle`` is the path of an open file or connection, ``crew`` that of threads or processes.
    """

    parts: dict[str, Any]
    whole: bool
    handle: str | None = None
    crew: str | None = None

    def change_from(self, earlier: Anatomy) -> str | None:
        """The first part that is not as it was earlier; None when all are."""
        for path, mark in self.parts.items():
            before = earlier.parts.get(path, self)
            if before is not mark and before != mark:  # a NaN is itself and yet not equal to itself
                return path
        return next((path for path in earlier.parts if path not in self.parts), None)


def anatomy(dataset: Any, *users: Any) -> Anatomy:
    """A bounded look at a data set's attributes and at what the user's own code behind it uses.

    ``users`` are other objects that make a batch, as a collate function. Whatever an object answers, nothing is raised.
    """
    parts: dict[str, Any] = {}
    handle = crew = None
    whole = True
    seen: set[int] = set()
    level = [(type(item).__name__, item) for item in (dataset, *users)]
    for _ in range(DEEPEST):
        following: list[tuple[str, Any]] = []
        for name, item in level:
            path = name
            while path in parts:  # two functions may mean different things by one name
                path += "'"
            try:
                parts[path], is_seen = _mark(item)
                if isinstance(item, (*PLAIN, *CLOSED)) or id(item) in seen:
                    whole = whole and is_seen
                    continue
                seen.add(id(item))
                if is_open_handle(item):
                    handle = handle or path
                elif is_crew(item):
                    crew = crew or path
                else:
                    following += _insides(path, item)
                whole = whole and is_seen
            except Exception:  # an object of the user's may answer anything, and fail at it
                parts[path], whole = id(item), False
            if len(parts) > MOST_PARTS:
                return Anatomy(parts, False, handle, crew)
        level = following
    return Anatomy(parts, whole and not level, handle, crew)


def _mark(item: Any) -> tuple[Any, bool]:
    """Something that changes with an item, and whether no change of its own could be missed."""
    if isinstance(item, PLAIN):
        return item, True
    if isinstance(item, torch.Tensor):
        version = None if item.is_inference() else item._version
        return (id(item), version, tuple(item.shape)), True
    if isinstance(item, (*SEQUENCES, dict, set, frozenset)):
        return ((id(item), len(item)), True) if len(item) <= LONG else _hash(item)
    if isinstance(item, bytearray | array.array):
        return zlib.crc32(memoryview(item).cast("B")), True
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(item, numpy.ndarray | numpy.generic):
        is_seen = item.nbytes <= MOST_BYTES and not item.dtype.hasobject
        return (zlib.crc32(item.tobytes()) if is_seen else id(item)), is_seen
    return id(item), True


def _hash(container: Any) -> tuple[Any, bool]:
    size = id(container), len(container)
    if len(container) > MOST_ITEMS:
        return size, False
    try:
        return (size, hash(frozenset(container) if isinstance(container, set | frozenset) else _flat(container))), True
    except TypeError:
        return size, False


def _flat(container: Any) -> tuple[Any, ...]:
    return tuple(container.items()) if isinstance(container, dict) else tuple(container)


def _insides(path: str, item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, dict):
        if len(item) <= LONG:
            yield from ((f"{path}[{key!r}]", value) for key, value in list(item.items()))
    elif isinstance(item, SEQUENCES):
        if len(item) <= LONG:
            yield from ((f"{path}[{position}]", value) for position, value in enumerate(list(item)))
    elif isinstance(item, types.FunctionType):
        yield from used_by(item)
    elif isinstance(item, WRAPPED):
        yield path, item.__func__
    elif isinstance(item, property):
        yield path, item.fget
    elif isinstance(item, types.MethodType):
        yield from ((path, item.__func__), (f"{path}.__self__", item.__self__))
    elif isinstance(item, partial):
        yield from ((path, item.func), (f"{path}.args", item.args), (f"{path}.keywords", item.keywords))
    else:
        for name, value in list(getattr(item, "__dict__", {}).items()):
            yield f"{path}.{name}", value
        for cls in filter(is_users, type(item).__mro__):
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                if hasattr(item, name):
                    yield f"{path}.{name}", getattr(item, name)
        yield from methods_of(type(item))
