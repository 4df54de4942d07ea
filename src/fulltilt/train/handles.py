"""HDF5 files that a data set opened before its workers start: after a fork they share one position in the file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from fulltilt.errors import UsageError

# A data set in a Subset in a wrapper, its files in a list or a dict.
DEEPEST = 4
WIDEST = 256


def refuse_open_handles(samples: Any, workers: int) -> None:
    """Raise UsageError naming the attribute and the file, where workers would read through an inherited handle."""
    h5py = sys.modules.get("h5py")
    if not workers or h5py is None:
        return
    for attribute, handle in _attributes(samples, type(samples).__name__, DEEPEST):
        if isinstance(handle, h5py.File | h5py.Group | h5py.Dataset) and handle:
            key = "" if isinstance(handle, h5py.File) else f", key {handle.name}"
            raise UsageError(
                f"{attribute} holds an open HDF5 file ({handle.file.filename}{key}) that {workers} workers would share",
                "Open it in __getitem__, once in each process, or set workers: 0.",
            )


def _attributes(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    yield name, value
    if depth == 0 or isinstance(value, str | bytes | type) or type(value).__module__.partition(".")[0] in _OPAQUE:
        return
    if isinstance(value, Mapping):
        inner = [(f"{name}[{key!r}]", item) for key, item in list(value.items())[:WIDEST]]
    elif isinstance(value, list | tuple):
        inner = [(f"{name}[{place}]", item) for place, item in enumerate(value[:WIDEST])]
    else:
        inner = [(f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items()]
    for inner_name, item in inner:
        yield from _attributes(item, inner_name, depth - 1)


# Nothing of the data set's own lies inside these.
_OPAQUE = frozenset({"h5py", "numpy", "pandas", "PIL"})
