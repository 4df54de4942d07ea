"""Drawing from a data set in this process without leaving a trace: no generator moved, no handle left open.

Data sets open their files at the first sample, so that each worker has a handle of its own. A look at a few samples
before the workers are forked would open them here, and all workers would inherit one position in one file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from fulltilt.feed.generators import Generators
from fulltilt.feed.leaves import is_image

# A data set in a Subset in a wrapper, its archives in a list or a dict of a few.
_DEPTH, _WIDEST = 5, 64
_DATA = (bool, int, float, complex, str, bytes, bytearray, torch.Tensor, torch.dtype, torch.device, type(None))
_DATA_MODULES = frozenset({"numpy", "pandas", "pyarrow"})


@contextmanager
def untouched(dataset: Any, generators: Generators | None = None) -> Iterator[None]:
    """Within the block ``dataset`` may be drawn from; handles that it opens meanwhile are let go at the end."""
    before = [(item, dict(vars(item))) for item in objects_in(dataset)]
    unfilled = [value for _, attributes in before for value in attributes.values() if _is_empty(value)]
    with (generators or Generators(dataset)).untouched():
        try:
            yield
        finally:
            for item, attributes in before:
                _forget_handles(item, attributes)
            for container in unfilled:
                if not _is_data(container):
                    container.clear()


def _forget_handles(item: Any, before: dict[str, Any]) -> None:
    now = vars(item)
    for name in [name for name, value in now.items() if before.get(name) is None and not _is_data(value)]:
        if name in before:
            now[name] = None
        else:
            del now[name]


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict | list | set) and not value


def _is_data(value: Any, depth: int = 3) -> bool:
    """Whether ``value`` is plain data, which workers may well inherit. Whatever else it is may hold a handle."""
    if isinstance(value, _DATA) or is_image(value) or type(value).__module__.partition(".")[0] in _DATA_MODULES:
        return True
    if depth and isinstance(value, dict | MappingProxyType):  # others may be files: of h5py, of shelve
        return all(_is_data(item, depth - 1) for item in itertools.islice(value.values(), _WIDEST))
    if depth and isinstance(value, list | tuple | set | frozenset):
        return all(_is_data(item, depth - 1) for item in itertools.islice(value, _WIDEST))
    return False


def objects_in(dataset: Any) -> Iterator[Any]:
    """``dataset`` and the objects with attributes that it is made of."""
    seen: set[int] = set()
    level = [dataset]
    for _ in range(_DEPTH):
        following: list[Any] = []
        for item in level:
            if id(item) in seen or isinstance(item, type):
                continue
            seen.add(id(item))
            if isinstance(item, dict | MappingProxyType):
                following += itertools.islice(item.values(), _WIDEST)
            elif isinstance(item, list | tuple):
                following += itertools.islice(item, _WIDEST)
            elif type(getattr(item, "__dict__", None)) is dict and not isinstance(item, _DATA):
                yield item
                following += vars(item).values()
        level = [item for item in following if not isinstance(item, _DATA)]
