"""What a data set is made of, as far as a bounded walk sees: to notice that it changes, and what must not be forked."""

from __future__ import annotations

import io
import sys
import types
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

DEEPEST = 8
MOST_PARTS = 4000
# A longer container, and an array, count by a hash of what they hold, if that is not too much to read.
LONG = 200
MOST_ITEMS = 2_000_000
MOST_BYTES = 64 << 20
PLAIN = (str, bytes, int, float, complex, bool, type(None))
CLOSED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
# Libraries whose open handles do not survive a fork: readers in two processes would share a position or a lock.
HANDLES_OF = frozenset({"h5py", "lmdb", "sqlite3", "tables", "netCDF4", "tarfile", "zipfile", "socket"})
UNSEEN = object()


@dataclass(frozen=True)
class Anatomy:
    """``parts`` by their path; ``whole``: a change could not be missed; ``handle`` is the path of an open handle."""

    parts: dict[str, Any]
    whole: bool
    handle: str | None

    def change_from(self, earlier: Anatomy) -> str | None:
        """The first part that is not as it was earlier; None when all are."""
        for path, mark in self.parts.items():
            if earlier.parts.get(path, self) != mark:
                return path
        return next((path for path in earlier.parts if path not in self.parts), None)


def anatomy(dataset: Any) -> Anatomy:
    """A bounded look at a data set's attributes."""
    parts: dict[str, Any] = {}
    handle, whole = None, True
    seen: set[int] = set()
    level = [(type(dataset).__name__, dataset)]
    for _ in range(DEEPEST):
        following: list[tuple[str, Any]] = []
        for path, item in level:
            parts[path] = mark = _mark(item)
            whole = whole and mark is not UNSEEN
            if isinstance(item, (*PLAIN, *CLOSED, torch.Tensor)) or id(item) in seen:
                continue
            if len(parts) > MOST_PARTS:
                return Anatomy(parts, False, handle)
            seen.add(id(item))
            if handle is None and _is_open_handle(item):
                handle = path
            following += _insides(path, item)
        level = following
    return Anatomy(parts, whole and not level, handle)


def _mark(item: Any) -> Any:
    if isinstance(item, PLAIN):
        return item
    if isinstance(item, torch.Tensor):
        return id(item), item._version, tuple(item.shape)
    if isinstance(item, list | tuple | dict | set | frozenset):
        return (id(item), len(item)) if len(item) <= LONG else _hash(item)
    if hasattr(item, "__array_interface__"):
        return zlib.crc32(item.tobytes()) if item.nbytes <= MOST_BYTES and not item.dtype.hasobject else UNSEEN
    return id(item)


def _hash(container: Any) -> Any:
    if len(container) > MOST_ITEMS:
        return UNSEEN
    try:
        return hash(frozenset(container) if isinstance(container, set | frozenset) else _flat(container))
    except TypeError:
        return UNSEEN


def _flat(container: Any) -> tuple[Any, ...]:
    return tuple(container.items()) if isinstance(container, dict) else tuple(container)


def _insides(path: str, item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, dict):
        if len(item) <= LONG:
            yield from ((f"{path}[{key!r}]", value) for key, value in list(item.items()))
    elif isinstance(item, list | tuple):
        if len(item) <= LONG:
            yield from ((f"{path}[{position}]", value) for position, value in enumerate(item))
    else:
        for name, value in list(getattr(item, "__dict__", {}).items()):
            yield f"{path}.{name}", value


def _is_open_handle(item: Any) -> bool:
    if isinstance(item, io.IOBase):
        return not item.closed and item not in (sys.stdin, sys.stdout, sys.stderr) and not isinstance(item, io.BytesIO)
    return type(item).__module__.partition(".")[0] in HANDLES_OF and not isinstance(item, type)
