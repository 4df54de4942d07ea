"""A state dict as plain JSON values and named tensors, and back: nothing in it needs unpickling.

Tensors are replaced by ``{"$tensor": name}``; tuples and dicts that JSON cannot hold are marked in the same way.
"""

from __future__ import annotations

from typing import Any

import torch

from fulltilt.errors import UsageError


def flatten(tree: Any, prefix: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """Split ``tree`` into plain values and its tensors by path. Raises UsageError for what neither can hold."""
    tensors: dict[str, torch.Tensor] = {}
    return _flatten(tree, prefix or "state", tensors), tensors


def _flatten(node: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        tensors[path] = node
        return {"$tensor": path}
    if node is None or type(node) in (bool, int, float, str):
        return node
    if isinstance(node, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in node):
            return {key: _flatten(value, f"{path}/{key}", tensors) for key, value in node.items()}
        if all(type(key) in (bool, int, float, str) for key in node):
            return {"$items": [[key, _flatten(value, f"{path}/{key!r}", tensors)] for key, value in node.items()]}
        raise UsageError(f"cannot save {path}: a dict has keys that are neither numbers nor text")
    if isinstance(node, list):
        return [_flatten(value, f"{path}/{i}", tensors) for i, value in enumerate(node)]
    if isinstance(node, tuple):
        return {"$tuple": [_flatten(value, f"{path}/{i}", tensors) for i, value in enumerate(node)]}
    raise UsageError(
        f"cannot save {path}: {type(node).__name__} is neither a tensor nor a plain value",
        "Keep only tensors, numbers, text, lists and dicts in state_dict().",
    )


def unflatten(plain: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree that ``flatten`` took apart. Raises KeyError when a tensor is missing."""
    if isinstance(plain, list):
        return [unflatten(value, tensors) for value in plain]
    if not isinstance(plain, dict):
        return plain
    if "$tensor" in plain:
        return tensors[plain["$tensor"]]
    if "$tuple" in plain:
        return tuple(unflatten(value, tensors) for value in plain["$tuple"])
    if "$items" in plain:
        return {key: unflatten(value, tensors) for key, value in plain["$items"]}
    return {key: unflatten(value, tensors) for key, value in plain.items()}
