"""What a data set holds, and what of it does not survive a fork: open files and connections."""

from __future__ import annotations

import functools
import io
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fulltilt.feed.storage import start_method

# Libraries whose open handles must not be shared: readers in two processes would share a position or a lock.
HANDLES_OF = frozenset({"h5py", "lmdb", "sqlite3", "tables", "netCDF4", "tarfile", "zipfile", "socket"})
# What these libraries give out that is only data.
RECORDS = frozenset({"TarInfo", "ZipInfo", "Row", "Empty", "Datatype"})
IS_CLOSED: dict[str, Callable[[Any], bool]] = {
    "h5py": lambda item: not item,
    "tables": lambda item: not getattr(item, "isopen", True),
    "netCDF4": lambda item: hasattr(item, "isopen") and not item.isopen(),
    "tarfile": lambda item: bool(getattr(item, "closed", False)),
    "zipfile": lambda item: getattr(item, "fp", item) is None,
    "socket": lambda item: hasattr(item, "fileno") and item.fileno() < 0,
}

# Bounds of the search for generators: data sets hold lists of a million paths, and models, and modules.
_DEPTH = 8
_OBJECTS = 20_000
_LONG_LIST = 256

# Not searched: their insides are theirs, and their generators are the global ones.
_CLOSED = (str, bytes, bytearray, int, float, complex, bool, type(None), torch.Tensor, types.ModuleType)

# Code that asks in which process it runs opens its files there.
_KNOWS_ITS_PROCESS = frozenset({"getpid", "get_worker_info"})


def workers_without_sharing(dataset: Any, workers: int) -> tuple[int, str | None]:
    """How many of ``workers`` may read ``dataset``, and why not all of them. See ``shared_handle``."""
    held = shared_handle(dataset) if workers else None
    if held is None:
        return workers, None
    return 0, (
        f"read in this process alone: the data set holds an open {held}, which {workers} workers would share; "
        "open it in the first __getitem__ for workers"
    )


def shared_handle(dataset: Any) -> str | None:
    """The open file of ``dataset`` that its workers would share, in words; None where there is none.

    Forked workers share its position. What they read through it is now and then somebody else's sample, and no error.
    """
    if start_method() != "fork":
        return None
    parts = list(reached([dataset]))
    handle = next((item for item in parts if is_open_handle(item)), None)
    if handle is None or any(_knows_its_process(item) for item in parts):
        return None
    # A data set in an HDF5 file has the name of its key; its file has that of the file.
    opened = handle if hasattr(handle, "filename") or not hasattr(handle, "file") else handle.file
    name = getattr(opened, "filename", None) or getattr(opened, "name", None)
    key = "" if opened is handle else f", key {handle.name}"
    return f"{type(handle).__name__}{f' of {name}{key}' if isinstance(name, str) else ''}"


def _knows_its_process(item: Any) -> bool:
    is_users = isinstance(item, types.FunctionType) and own_module(item.__module__)
    return is_users and not _KNOWS_ITS_PROCESS.isdisjoint(names_in(item.__code__))


def is_open_handle(item: Any) -> bool:
    """Whether this is a file or a connection that is open to read from. Files that are written to are no data."""
    if isinstance(item, io.IOBase):
        if item.closed or isinstance(item, io.BytesIO | io.StringIO) or item in (sys.stdin, sys.stdout, sys.stderr):
            return False
        return item.readable() and "a" not in str(getattr(item, "mode", ""))
    library = type(item).__module__.partition(".")[0]
    if library not in HANDLES_OF or isinstance(item, type) or type(item).__name__ in RECORDS:
        return False
    is_closed = IS_CLOSED.get(library)
    return is_closed is None or not is_closed(item)


# --------------------------------------------------------------------------- what a data set holds


def reached(roots: Sequence[Any]) -> Iterator[Any]:
    """Every object in the attributes, classes, containers, closures and used globals of ``roots``, within bounds."""
    seen: dict[int, Any] = {}  # held, so that no other object takes an id
    level: list[Any] = list(roots)
    for _ in range(_DEPTH):
        following: list[Any] = []
        for item in level:
            if id(item) in seen or len(seen) > _OBJECTS:
                continue
            seen[id(item)] = item
            yield item
            if not isinstance(item, _CLOSED) and type(item).__module__.partition(".")[0] not in ("random", "numpy"):
                following += _insides(item)
        level = following


def _insides(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return [value for value in list(item.values())[:_LONG_LIST] if not isinstance(value, _CLOSED)]
    if isinstance(item, list | tuple | set | frozenset):
        return [value for value in list(item)[:_LONG_LIST] if not isinstance(value, _CLOSED)]
    if isinstance(item, types.MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, types.BuiltinMethodType | types.MethodWrapperType):
        return [item.__self__]
    if isinstance(item, functools._lru_cache_wrapper):
        return [item.__wrapped__]
    if isinstance(item, functools.partial):
        return [item.func, item.args, item.keywords]
    if isinstance(item, types.GeneratorType):
        return list(item.gi_frame.f_locals.values()) if item.gi_frame is not None else []
    if isinstance(item, types.FunctionType):
        cells = [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
        return [*_used_by(item), *cells, *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
    if isinstance(item, type):
        return _members(item) if own_module(item.__module__) else []
    own = list(getattr(item, "__dict__", {}).values())
    slots = [getattr(item, name, None) for cls in type(item).__mro__ for name in _slots(cls)]
    return own + slots + _members(type(item))


def _members(cls: type) -> list[Any]:
    """Attributes of a class, and its methods: what they use of their module is often a generator of the user's file."""
    members = [member for base in cls.__mro__ if _users_own(base) for member in vars(base).values()]
    return [_function(member) for member in members if not isinstance(member, _CLOSED)]


def _function(member: Any) -> Any:
    """The function within a static or class method or a property; anything else as it is."""
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, functools.cached_property) else getattr(member, "__func__", member)


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


def _users_own(cls: type) -> bool:
    return cls is not object and cls.__module__.split(".")[0] not in ("torch", "builtins", "typing", "abc")


def own_module(name: str | None) -> bool:
    """Whether a module belongs to the user, and not to Python or an installed library."""
    if name is None or name == "__main__":  # also under a launcher, whose own file __main__ then is
        return True
    if name.split(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or ("site-packages" not in file and "dist-packages" not in file)


def names_in(code: types.CodeType) -> list[str]:
    """The names that ``code`` and the functions within it look up, sorted."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return sorted(set(code.co_names).union(*inner))


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    """The globals that ``function`` uses; of the user's own modules, those of their names that it uses."""
    names = names_in(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType) and own_module(value.__name__):
            yield from (vars(value)[inner] for inner in names if inner in vars(value))
        elif value is not None:
            yield value
