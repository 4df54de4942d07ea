"""A batch, whatever its structure: how many samples it has, its parts, and the same on another device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fulltilt.errors import UsageError
from fulltilt.feed.structure import own_move


def size(batch: Any) -> int:
    """The number of samples: the length of the first tensor or list in the batch. Raises UsageError without one."""
    found = _size(batch)
    if found is None:
        raise UsageError(f"cannot tell how many samples a batch of type {type(batch).__name__} has")
    return found


def _size(node: Any) -> int | None:
    if isinstance(node, torch.Tensor):
        return int(node.shape[0]) if node.ndim else None
    children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
    for child in children:
        found = _size(child)
        if found is not None:
            return found
    if isinstance(node, list) and node:  # a list of texts or numbers has one entry a sample
        return len(node)
    return None


def split(batch: Any, most: int | None) -> Iterator[tuple[Any, int]]:
    """The batch in parts of at most ``most`` samples, each with its number of samples."""
    total = size(batch)
    if most is None or total <= most:
        yield batch, total
        return
    for first in range(0, total, most):
        end = min(first + most, total)
        yield _cut(batch, first, end, total), end - first


def _cut(node: Any, first: int, end: int, total: int) -> Any:
    if isinstance(node, torch.Tensor):
        return node[first:end] if node.ndim and node.shape[0] == total else node
    if isinstance(node, Mapping):
        return {key: _cut(value, first, end, total) for key, value in node.items()}
    if isinstance(node, list) and len(node) == total and _size(node) in (None, total) and not _holds_tensors(node):
        return node[first:end]
    if isinstance(node, list | tuple):
        parts = [_cut(value, first, end, total) for value in node]
        return _rebuilt(node, parts)
    return node


def _holds_tensors(node: list[Any]) -> bool:
    return any(isinstance(child, torch.Tensor | Mapping | tuple | list) for child in node)


def to_device(batch: Any, device: torch.device, memory_format: torch.memory_format | None = None) -> Any:
    """The batch on ``device``. Copies from pinned memory do not wait. Images may change to channels-last."""
    if isinstance(batch, torch.Tensor):
        if memory_format is not None and batch.ndim == 4 and batch.is_floating_point():
            return batch.to(device, non_blocking=True, memory_format=memory_format)
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device, memory_format) for key, value in batch.items()}
    if (move := own_move(batch)) is not None:
        return move(device)
    if isinstance(batch, list | tuple):
        return _rebuilt(batch, [to_device(value, device, memory_format) for value in batch])
    return batch


def _rebuilt(original: Any, parts: list[Any]) -> Any:
    if isinstance(original, tuple):
        return type(original)(*parts) if hasattr(original, "_fields") else tuple(parts)
    return parts
