"""What one sample is made of: nested tuples and dicts of tensors, arrays, images and numbers, packed into a row.

Every store and every buffer of the feed holds such rows. All rows of a data set have the same layout, so that a batch
is assembled by one gather and its tensors are cut out of it without touching a sample.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fulltilt.feed.leaves import Leaf, Unstorable, as_tensor, bytes_of, kind_of, stacked_type

# Rows and leaves start at multiples of this, so that a gather moves whole 16-byte words whatever the dtype.
ALIGNMENT = 16


class ShapeChanged(Exception):  # noqa: N818 - a verdict about a sample, caught by the loader
    """A sample has another structure, shape or dtype than the first one; the message says which."""


@dataclass(frozen=True)
class Layout:
    """The structure shared by all samples of a data set."""

    skeleton: Any
    leaves: tuple[Leaf, ...]
    row_bytes: int

    def describe(self) -> str:
        """The layout in words; equal layouts give equal texts."""
        return "; ".join(leaf.describe() for leaf in self.leaves)

    def pack(self, sample: Any, row: torch.Tensor) -> None:
        """Write ``sample`` into ``row`` (uint8). Raises ShapeChanged or Unstorable."""
        values = self._in_order(list(_flatten(sample, "")))
        for leaf, (path, value) in zip(self.leaves, values, strict=True):
            tensor = as_tensor(value, path)
            if path != leaf.path or tensor.shape != leaf.shape or tensor.dtype != leaf.dtype:
                found = f"{path or 'sample'} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                raise ShapeChanged(f"{found} instead of {leaf.describe()}")
            if leaf.nbytes:
                row[leaf.offset : leaf.offset + leaf.nbytes].copy_(bytes_of(tensor))

    def _in_order(self, values: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """The parts of a sample as the first one had them: the order of a dict's keys is no part of its shape."""
        if len(values) != len(self.leaves):
            raise ShapeChanged(f"it has {len(values)} parts instead of {len(self.leaves)}")
        if all(path == leaf.path for leaf, (path, _) in zip(self.leaves, values, strict=True)):
            return values
        named = dict(values)
        return [
            (leaf.path, named[leaf.path]) if leaf.path in named else pair
            for leaf, pair in zip(self.leaves, values, strict=True)
        ]

    def split(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The leaves of a batch as views into its packed ``rows``: one tensor [batch, *shape] for each leaf."""
        parts = []
        for leaf in self.leaves:
            part = rows[:, leaf.offset : leaf.offset + leaf.nbytes]
            if not leaf.nbytes:
                parts.append(torch.empty((rows.shape[0], *leaf.shape), dtype=leaf.dtype, device=rows.device))
                continue
            # Offsets and row lengths are multiples of 16 bytes, so that the view in another dtype needs no copy.
            part = part.view(leaf.dtype)
            parts.append(part.view(len(rows), *leaf.shape))
        return parts

    def build(self, leaves: list[Any]) -> Any:
        """A sample of the data set's own structure from its leaves."""
        return _build(self.skeleton, iter(leaves))

    def build_batch(self, leaves: list[Any]) -> Any:
        """A batch from its leaves, in the structure that torch's DataLoader gives it: tuples have become lists."""
        typed = (
            part if leaf.stacked is None else part.as_subclass(leaf.stacked)
            for leaf, part in zip(self.leaves, leaves, strict=True)
        )
        return _build(self.skeleton, typed, list)


def layout_of(sample: Any) -> Layout:
    """The layout of data set samples that look like ``sample``. Raises Unstorable."""
    leaves: list[Leaf] = []
    offset = 0
    for path, value in _flatten(sample, ""):
        tensor = as_tensor(value, path)
        nbytes = tensor.numel() * tensor.element_size()
        wrapper = type(value) if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor else None
        stacked = None if wrapper is None else stacked_type(value)
        leaves.append(Leaf(path, tuple(tensor.shape), tensor.dtype, offset, nbytes, kind_of(value), wrapper, stacked))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if not leaves:
        raise Unstorable(f"a sample is {type(sample).__name__} without any tensor in it")
    names = Counter(leaf.path for leaf in leaves)
    if len(names) < len(leaves):  # the keys 1 and "1", say: nobody could tell them apart when they change places
        raise Unstorable(f"two parts of a sample are called {names.most_common(1)[0][0]}")
    return Layout(_skeleton(sample), tuple(leaves), max(offset, ALIGNMENT))


def same_sample(left: Any, right: Any) -> bool:
    """Whether two samples are equal to the bit, in structure, dtype and content (NaN equals NaN)."""
    try:
        layout = layout_of(left)
        first, second = (torch.zeros(layout.row_bytes, dtype=torch.uint8) for _ in range(2))
        layout.pack(left, first)
        layout.pack(right, second)
    except ShapeChanged:
        return False
    return torch.equal(first, second)


# --------------------------------------------------------------------------- nesting


def _flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{path}[{number}]")
    else:
        yield path, value


def _skeleton(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = {key: _skeleton(item) for key, item in value.items()}
        return items if type(value) is dict else _Mapped(mapping_like(value), items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _Named(type(value), tuple(_skeleton(item) for item in value))
    if isinstance(value, tuple):
        return tuple(_skeleton(item) for item in value)
    if isinstance(value, list):
        entries = [_skeleton(item) for item in value]
        return entries if type(value) is list else _Listed(type(value), entries)
    return None


@dataclass(frozen=True)
class _Named:
    cls: Callable[..., Any]
    items: tuple[Any, ...]


@dataclass(frozen=True)
class _Listed:
    cls: type
    items: list[Any]


@dataclass(frozen=True)
class _Mapped:
    make: Callable[[dict[Any, Any]], Any]
    items: dict[Any, Any]


def mapping_like(value: Mapping[Any, Any]) -> Callable[[dict[Any, Any]], Any]:
    """What makes a mapping of the type of ``value`` from a dict; a dict where that type is made otherwise."""
    if isinstance(value, defaultdict):
        return functools.partial(defaultdict, value.default_factory)
    try:
        return type(value) if isinstance(type(value)({}), Mapping) else dict  # type: ignore[call-arg]
    except Exception:
        return dict


def own_move(value: Any) -> Callable[[torch.device], Any] | None:
    """How a batch of a class of its own moves, such as a packed sequence or a graph; None where its parts do."""
    move = getattr(value, "to", None)
    if not callable(move) or isinstance(value, type):
        return None

    def moved(device: torch.device) -> Any:
        there = move(device)
        return value if there is None else there  # it moved itself and forgot to say so

    return moved


def sequence_of(cls: type, items: list[Any]) -> Any:
    """``items`` as a ``cls``, which is a list or a tuple; as a plain one where that type is made otherwise."""
    try:
        return cls(items)
    except Exception:
        return tuple(items) if issubclass(cls, tuple) else items


def _build(skeleton: Any, leaves: Iterator[Any], for_tuple: type = tuple) -> Any:
    if isinstance(skeleton, dict):
        return {key: _build(item, leaves, for_tuple) for key, item in skeleton.items()}
    if isinstance(skeleton, _Mapped):
        return skeleton.make({key: _build(item, leaves, for_tuple) for key, item in skeleton.items.items()})
    if isinstance(skeleton, _Named):
        return skeleton.cls(*(_build(item, leaves, for_tuple) for item in skeleton.items))
    if isinstance(skeleton, _Listed):
        return sequence_of(skeleton.cls, [_build(item, leaves, for_tuple) for item in skeleton.items])
    if isinstance(skeleton, tuple):
        return for_tuple(_build(item, leaves, for_tuple) for item in skeleton)
    if isinstance(skeleton, list):
        return [_build(item, leaves, for_tuple) for item in skeleton]
    return next(leaves)
