"""What one sample is made of: nested tuples and dicts of tensors, arrays, images and numbers, packed into a row.

Every store and every buffer of the feed holds such rows. All rows of a data set have the same layout, so that a batch
is assembled by one gather and its tensors are cut out of it without touching a sample.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_IMAGE_MODES = {"RGB": 3, "L": 1, "RGBA": 4}


class Unstorable(Exception):  # noqa: N818 - a verdict about a sample, caught by the loader
    """A sample holds something that cannot be kept as a fixed-shape tensor; the message says what and where."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of a sample: where it lies in the row, and what it has to become again."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int
    kind: str  # "tensor", "array", "image:RGB", "int", "float" or "bool"
    wrapper: type | None = None  # a tensor subclass (torchvision's tv_tensors), needed by transforms that look at it
    stacked: type | None = None  # what torch makes of several: that subclass again, or a plain tensor

    def describe(self) -> str:
        """The leaf in words, for messages and for the key of a cache."""
        return f"{self.path or 'sample'}: {self.kind} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def stacked_type(value: torch.Tensor) -> type | None:
    """The subclass that torch makes of several such values; None for a plain tensor."""
    try:
        made = type(torch.stack([value, value]))
    except Exception:  # the subclass's own code
        return None
    return None if made is torch.Tensor else made


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor of the host, one after the other."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # Not a view: torch calls one element contiguous whatever its stride is, and then refuses to see it as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def is_image(value: Any) -> bool:
    """Whether ``value`` is a PIL image; PIL is not imported for the question."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def _is_array(value: Any) -> bool:
    module = sys.modules.get("numpy")
    return module is not None and isinstance(value, module.ndarray | module.generic)


def kind_of(value: Any) -> str:
    """What a value is, as ``Leaf.kind`` has it."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if is_image(value):
        return f"image:{value.mode}"
    if _is_array(value):
        return "array"
    return type(value).__name__


def as_tensor(value: Any, path: str) -> torch.Tensor:
    """A leaf as default_collate would turn it into a tensor; a PIL image becomes uint8 [channels, height, width]."""
    if isinstance(value, torch.Tensor):
        kind = "quantized" if value.is_quantized else "meta" if value.is_meta else value.layout
        if kind is not torch.strided:
            raise Unstorable(f"{path or 'the sample'} is a {kind} tensor; only dense tensors can be kept")
        return value.detach().cpu().as_subclass(torch.Tensor).contiguous()
    if isinstance(value, bool):
        return torch.tensor(value, dtype=torch.bool)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise Unstorable(f"{path or 'the sample'} is {value}, which does not fit into 64 bits")
        return torch.tensor(value, dtype=torch.int64)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if is_image(value):
        if value.mode not in _IMAGE_MODES:
            raise Unstorable(f"{path or 'the sample'} is an image of mode {value.mode}; convert it to RGB or L")
        flat = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        width, height = value.size
        return flat.view(height, width, _IMAGE_MODES[value.mode]).permute(2, 0, 1).contiguous()
    if _is_array(value):
        try:
            return _array_as_tensor(value) if value.ndim else torch.tensor(value.item(), dtype=_dtype(value))
        except TypeError as error:
            raise Unstorable(
                f"{path or 'the sample'} is an array of {value.dtype}, which torch does not have"
            ) from error
    raise Unstorable(f"{path or 'the sample'} is {type(value).__name__}, which is not a tensor, array, image or number")


def _array_as_tensor(array: Any) -> torch.Tensor:
    """torch takes neither a flipped view nor the other byte order; a data set may return both."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.as_tensor(array).contiguous()


def _dtype(scalar: Any) -> torch.dtype:
    numpy = sys.modules["numpy"]
    return torch.as_tensor(numpy.zeros(1, dtype=scalar.dtype.newbyteorder("="))).dtype


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
