"""What is in a batch, whatever its structure: samples, bytes, padding; and how open HDF5 data sets are stored."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

DEEPEST = 4
WIDEST = 64
NUMBERS = (int, float)
# Rows of numbers are texts if they are this long and hold this many different ones, unlike labels and one-hot codes.
SHORTEST_TEXT, LONGEST_TEXT, FEWEST_TOKENS = 8, 1 << 16, 32
SOME_ROWS, SOME_TOKENS = 32, 64  # are enough to judge by
# The first few batches of a loader are inspected, and then one in so many.
INSPECT_FIRST, INSPECT_EVERY = 4, 32
MOST_SHAPES = 64


def count_samples(batch: Any, hint: int | None = None, last: int | None = None, *, batched: bool = False) -> int | None:
    """The number of samples in a batch; None when its structure does not show it.

    ``hint`` is the number of indices that the sampler asked for, ``last`` the number for the last batch of a pass. They
    only choose between counts that the batch itself shows. ``batched``: it is known not to be a single sample.
    """
    # The common case first, since this runs for every batch: columns in a tuple, a list or a dict.
    kind = type(batch)
    columns = batch if kind is list or kind is tuple else tuple(batch.values()) if kind is dict else (batch,)
    shape = getattr(columns[0], "shape", None) if columns else None
    if shape and hint == shape[0] != 1:
        return hint
    if not batched and (hint is None or hint == 1):
        shapes = [() if isinstance(column, NUMBERS) else getattr(column, "shape", None) for column in columns]
        if shape and len(shapes) > 1 and not [other for other in shapes if not other or other[0] != shape[0]]:
            return int(shape[0])  # asked for one sample, the data set gives a batch
        if _is_one_sample(shapes):
            return 1
    if shape and hint in (None, shape[0]):
        return int(shape[0])
    counts = list(_counts(batch, DEEPEST))
    if not counts or hint in counts:
        return hint if counts else None
    return last if last in counts else None if hint and _is_packed(batch) else counts[0]


def _is_packed(batch: Any) -> bool:
    """Whether it has columns of different length, as of samples packed one after another: meshes, texts, points."""
    columns = tuple(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(columns, tuple) or not all(hasattr(column, "ndim") for column in columns):
        return False
    return len({len(column) for column in columns if column.ndim}) > 1


def _is_one_sample(shapes: Sequence[Any]) -> bool:
    """Whether these are the shapes of one sample, drawn without batching: not all parts have the same first size."""
    firsts = [shape[0] for shape in shapes if shape]
    if () in shapes:
        return 0 < len(firsts) == len(set(firsts))
    return len(shapes) == 1 and shapes[0] is not None and len(shapes[0]) == 1


def _counts(value: Any, depth: int) -> Iterator[int]:
    """Candidate counts, the likeliest first."""
    graphs = getattr(value, "num_graphs", None)
    if isinstance(graphs, int):
        yield graphs
    if type(value).__name__ == "PackedSequence":
        yield int(value.batch_sizes[0])  # how many of its sequences have a first element
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "ndim"):
        if len(shape):
            yield int(shape[0])
        return
    if depth == 0 or isinstance(value, str | bytes):
        return
    if isinstance(value, Mapping):
        for item in list(value.values())[:WIDEST]:
            yield from _counts(item, depth - 1)
    elif isinstance(value, list | tuple):
        yield from _counts_of_sequence(value, depth)
    elif hasattr(value, "__dict__") and not callable(value):
        for item in list(vars(value).values())[:WIDEST]:
            yield from _counts(item, depth - 1)


def _counts_of_sequence(value: list[Any] | tuple[Any, ...], depth: int) -> Iterator[int]:
    # A tuple of columns (images, labels) counts by its first column; a list of samples counts by its length.
    inner = [list(_counts(item, depth - 1)) for item in value[:WIDEST]]
    firsts = {counts[0] for counts in inner if counts}
    if len(firsts) == 1 and len(value) <= WIDEST:
        yield firsts.pop()
        yield len(value)
    else:
        if value and not hasattr(value, "_fields"):  # a named tuple's length is that of its type
            yield len(value)
        for counts in inner:
            yield from counts
        if len(firsts) > 1 and all(hasattr(item, "ndim") for item in value):
            yield 1  # columns of one sample: an image, a vector, a label


def count_bytes(batch: Any) -> int:
    """Bytes of the tensors and arrays in a batch."""
    sizes = (getattr(leaf, "nbytes", None) for leaf in _leaves(batch, DEEPEST))
    return sum(size for size in sizes if isinstance(size, int))


def count_tensors(batch: Any) -> int:
    """How many tensors and arrays a batch has."""
    return sum(_kind(leaf) != "object" for leaf in _leaves(batch, DEEPEST))


def kind_of(batch: Any) -> str:
    """What the training thread receives: tensor, numpy or objects, and the container around it."""
    kinds = {_kind(leaf) for leaf in _leaves(batch, DEEPEST)}
    inside = "numpy" if "numpy" in kinds else "tensor" if "tensor" in kinds else "objects"
    if isinstance(batch, Mapping):
        return f"dict of {inside}"
    if isinstance(batch, list | tuple):
        return f"{type(batch).__name__} of {inside}"
    return inside


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if depth and isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item, depth - 1)
    else:
        yield value


def _kind(value: Any) -> str:
    module = type(value).__module__.partition(".")[0]
    return {"torch": "tensor", "numpy": "numpy"}.get(module, "tensor" if hasattr(value, "data_ptr") else "object")


def padding_share(batch: Any) -> float | None:
    """The share of padding in a batch of texts on the host; None where it holds no texts.

    By its attention mask, or else by rows of token numbers that end in runs of one number, of different lengths.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None:
        filled = (_filled_rows(column) for column in islice(_leaves(batch, DEEPEST), WIDEST))
        return next((share for share in filled if share is not None), None)
    if getattr(mask, "is_cuda", False) or getattr(mask, "ndim", 0) != 2 or not mask.shape[0]:
        return None
    return 1.0 - float((mask != 0).sum()) / float(mask.shape[0] * mask.shape[1])


def _filled_rows(column: Any) -> float | None:
    torch = sys.modules["torch"]
    if type(column) is not torch.Tensor or column.dtype not in (torch.int64, torch.int32) or column.ndim != 2:
        return None
    if column.is_cuda or column.shape[0] < 2 or not SHORTEST_TEXT <= column.shape[1] <= LONGEST_TEXT:
        return None
    rows = column[:SOME_ROWS]
    filled = (rows == rows[:, -1].mode().values).flip(1).cumprod(1).sum(1)
    filled *= filled > 1
    of_text = len(rows[:, :SOME_TOKENS].unique()) >= FEWEST_TOKENS and len(filled.unique()) > 1
    return float(filled.sum()) / rows.numel() if of_text else None


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors in the columns of a batch."""
    columns = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else (batch,)
    found = (getattr(column, "shape", None) for column in list(columns)[:WIDEST])
    return tuple(tuple(int(size) for size in shape) for shape in found if shape is not None)


# --------------------------------------------------------------------------- the batches of a loader


@dataclass
class BatchFacts:
    """What the batches of one loader hold, by those that were inspected."""

    largest_bytes: int | None = None
    kind: str | None = None
    tensors: int | None = None
    shapes: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)
    padding: float = 0.0
    padding_seen: int = 0

    def inspect(self, batch: Any) -> None:
        """Take in a batch; a few are enough."""
        self.largest_bytes = max(self.largest_bytes or 0, count_bytes(batch))
        self.kind = self.kind or kind_of(batch)
        self.tensors = max(self.tensors or 0, count_tensors(batch))
        if len(self.shapes) < MOST_SHAPES:
            self.shapes.add(shapes_of(batch))
        share = padding_share(batch)
        if share is not None:
            self.padding += share
            self.padding_seen += 1

    def fields(self) -> dict[str, Any]:
        """The fields of a LoaderRecord that they fill."""
        return {
            "batch_bytes": self.largest_bytes,
            "batch_kind": self.kind,
            "batch_tensors": self.tensors,
            "batch_shapes": len(self.shapes) or None,
            "padding_share": self.padding / self.padding_seen if self.padding_seen else None,
        }
