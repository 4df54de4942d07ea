"""Batches that the training process has made itself: before workers take over, they make the same ones, bit for bit.

Workers compute with one thread, in which a product of matrices may be rounded differently, and data sets and libraries
may do otherwise in a process of their own: nothing but doing it shows.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

# What is rounded differently comes out the same now and then.
MOST_WITNESSES = 4
MOST_BYTES = 256 << 20
# Batches are nested less deeply than this.
DEEPEST = 8


class Witness(NamedTuple):
    """The indices of a batch, and a copy of it as the training process made it."""

    index: Any
    batch: Any


class Differs(Exception):  # noqa: N818 - it says what happened
    """A worker has made another batch of the same indices. Says so to the user."""

    def __init__(self, is_prepared: bool) -> None:
        where = "torch computes with one thread and get_worker_info() answers"
        where = f"its worker_init_fn has run, {where}" if is_prepared else where
        super().__init__(f"its batches come out different in a worker, where {where}")


class Witnesses:
    """The first batches of a pass, as many as are needed and fit."""

    def __init__(self) -> None:
        self.kept: list[Witness] = []
        self._bytes = 0

    def keep(self, index: Any, batch: Any, size_bytes: int) -> None:
        """Keep a copy: training may change the batch itself."""
        if len(self.kept) < MOST_WITNESSES and (not self.kept or self._bytes + size_bytes <= MOST_BYTES):
            self._bytes += size_bytes
            self.kept.append(Witness(copy.deepcopy(index), copy.deepcopy(batch)))


def is_same(ours: Any, theirs: Any, depth: int = DEEPEST) -> bool:
    """Whether two batches hold the same numbers, bit for bit; what cannot be compared counts as the same."""
    numpy = sys.modules.get("numpy")
    if ours is theirs or depth == 0:
        return True
    if isinstance(ours, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and _same_tensor(ours, theirs)
    if numpy is not None and isinstance(ours, numpy.ndarray) and not ours.dtype.hasobject:
        same_kind = isinstance(theirs, numpy.ndarray) and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        return same_kind and ours.tobytes() == theirs.tobytes()
    if isinstance(ours, Mapping):
        same_keys = isinstance(theirs, Mapping) and ours.keys() == theirs.keys()
        return same_keys and all(is_same(value, theirs[key], depth - 1) for key, value in ours.items())
    if isinstance(ours, list | tuple):
        same_length = isinstance(theirs, list | tuple) and len(ours) == len(theirs)
        return same_length and all(is_same(*pair, depth - 1) for pair in zip(ours, theirs, strict=True))
    if isinstance(ours, str | bytes | int | float | complex | None):
        return bool(ours == theirs or (ours != ours and theirs != theirs))
    return is_same(getattr(ours, "__dict__", None), getattr(theirs, "__dict__", None), depth - 1)


def _same_tensor(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    return torch.equal(*(tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (ours, theirs)))
