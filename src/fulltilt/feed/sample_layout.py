"""The layout of a sample: nested tuples and dicts of tensors, arrays and numbers, packed into a row of bytes.

All rows of a data set have the same layout, so that a batch is one gather of rows, and its tensors are views of it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Unstorable(Exception):  # noqa: N818 - caught by the loader
    """A sample holds something that cannot be kept as a fixed-shape tensor; the message says what and where."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of a sample: its place in the row, its shape and dtype."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int

    def describe(self) -> str:
        """The leaf in words, for messages and for the key of a cache."""
        return f"{self.path or 'sample'}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def as_tensor(value: Any, path: str) -> torch.Tensor:
    """A leaf as the tensor that default_collate would make of it."""
    if isinstance(value, torch.Tensor):
        kind = "quantized" if value.is_quantized else "meta" if value.is_meta else value.layout
        if kind is not torch.strided:
            raise Unstorable(f"{path or 'the sample'} is a {kind} tensor; only dense tensors can be kept")
        return value.detach().cpu().as_subclass(torch.Tensor).contiguous()
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise Unstorable(f"{path or 'the sample'} is {value}, which does not fit into 64 bits")
        return torch.tensor(value)
    numpy = sys.modules.get("numpy")  # not imported for this
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        try:
            # torch takes neither another byte order nor negative strides.
            array = numpy.asarray(value, value.dtype.newbyteorder("="))
            return torch.as_tensor(array.copy() if any(stride < 0 for stride in array.strides) else array).contiguous()
        except (TypeError, RuntimeError) as error:  # RuntimeError: torch was built for another NumPy
            raise Unstorable(
                f"{path or 'the sample'} is an array of {value.dtype}, which torch does not have"
            ) from error
    raise Unstorable(f"{path or 'the sample'} is {type(value).__name__}, which is not a tensor, array or number")


# Rows and leaves start at multiples of this, so that a gather moves whole 16-byte words for any dtype.
ALIGNMENT = 16


class ShapeChanged(Exception):  # noqa: N818 - caught by the loader
    """A sample has another structure, shape or dtype than the first one; the message says which."""


@dataclass(frozen=True)
class Layout:
    """The structure shared by all samples of a data set."""

    structure: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    row_bytes: int

    def describe(self) -> str:
        """The layout in words; equal layouts give equal texts."""
        return "; ".join(leaf.describe() for leaf in self.leaves)

    def pack(self, sample: Any, row: torch.Tensor) -> None:
        """Write ``sample`` into ``row`` (uint8). Raises ShapeChanged or Unstorable."""
        try:
            values = self.structure.flatten_up_to(sample)  # the order of a dict's keys may differ
        except ValueError as error:
            raise ShapeChanged(f"its structure differs: {error}") from error
        for leaf, value in zip(self.leaves, values, strict=True):
            tensor = as_tensor(value, leaf.path)
            if tensor.shape != leaf.shape or tensor.dtype != leaf.dtype:
                found = f"{leaf.path or 'sample'} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                raise ShapeChanged(f"{found} instead of {leaf.describe()}")
            plain = tensor.resolve_conj().resolve_neg().contiguous()
            # Not ``view``: torch calls a single element contiguous with any stride, and then refuses another dtype.
            data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
            row[leaf.offset : leaf.offset + leaf.nbytes].copy_(data)

    def is_in(self, sample: Any, row: torch.Tensor) -> bool:
        """Whether ``sample`` is what was packed into ``row``, bit for bit (NaN equals NaN)."""
        packed = torch.zeros_like(row)
        try:
            self.pack(sample, packed)
        except (ShapeChanged, Unstorable):
            return False
        return torch.equal(packed, row)

    def split(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The leaves of a batch as views into its packed ``rows``: one tensor [batch, *shape] for each leaf."""
        return [
            rows[:, leaf.offset : leaf.offset + leaf.nbytes].view(leaf.dtype).view(len(rows), *leaf.shape)
            for leaf in self.leaves
        ]

    def build(self, leaves: list[Any]) -> Any:
        """A sample in the data set's structure from its leaves."""
        return pytree.tree_unflatten(leaves, self.structure)

    def build_batch(self, leaves: list[Any]) -> Any:
        """A batch from its leaves, in the structure that torch's DataLoader returns: lists instead of tuples."""
        return _with_lists(self.build(leaves))


def _with_lists(value: Any) -> Any:
    if type(value) in (tuple, list):
        return [_with_lists(item) for item in value]
    if isinstance(value, tuple):
        return type(value)(*map(_with_lists, value))
    if isinstance(value, dict):
        for key in value:
            value[key] = _with_lists(value[key])
    return value


def layout_of(sample: Any) -> Layout:
    """The layout of data set samples that look like ``sample``. Raises Unstorable."""
    leaves: list[Leaf] = []
    offset = 0
    values, structure = pytree.tree_flatten_with_path(sample)
    for keys, value in values:
        path = pytree.keystr(keys)
        tensor = as_tensor(value, path)
        nbytes = tensor.numel() * tensor.element_size()
        leaves.append(Leaf(path, tuple(tensor.shape), tensor.dtype, offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if not leaves:
        raise Unstorable(f"a sample is {type(sample).__name__} without any tensor in it")
    return Layout(structure, tuple(leaves), max(offset, ALIGNMENT))


def container_like(node: Any, parts: Sequence[Any]) -> Any:
    """``node``, a mapping, tuple or list, with other ``parts``; a plain one if its type cannot be made so."""
    made: Any = dict(zip(node, parts, strict=True)) if isinstance(node, Mapping) else list(parts)
    try:
        if isinstance(node, defaultdict):
            return defaultdict(node.default_factory, made)
        return type(node)(*parts) if hasattr(node, "_fields") else type(node)(made)
    except Exception:  # a type of the user's own
        return tuple(parts) if isinstance(node, tuple) else made
