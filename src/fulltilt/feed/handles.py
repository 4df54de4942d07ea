"""What a data set may hold that does not survive a fork: open files and connections, threads and processes."""

from __future__ import annotations

import io
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import Executor
from multiprocessing.pool import Pool
from typing import Any

from fulltilt.feed.generators import names_in, own_module, reached
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


def is_crew(item: Any) -> bool:
    """Whether this works with threads or processes of its own: in a forked worker nobody would answer it."""
    if isinstance(item, threading.Thread):
        return item.is_alive() and item is not threading.main_thread()
    # An executor starts its threads when it is first used; until then it may be forked.
    return isinstance(item, Pool) or (isinstance(item, Executor) and bool(getattr(item, "_threads", True)))
