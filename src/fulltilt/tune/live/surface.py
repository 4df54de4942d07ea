"""The outermost parts of a data set, cheap enough to look at before every batch.

Workers have the data set as it was when they were forked. A script without workers may change its own in the middle of
a pass (a curriculum, a transform that is switched off) and sees that in the very next batch.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch

DEEPEST = 3
MOST_MARKS = 64
SHORT = 16
# By their very type: looking it up is ten times as fast as isinstance, and this is done for every batch.
PLAIN = frozenset((str, bytes, int, float, bool, type(None)))
SIZED = frozenset((list, tuple, dict, set))
CLOSED = frozenset((types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, torch.Tensor))


def surface(*makers: Any) -> tuple[Any, ...]:
    """Marks of the attributes of what makes a batch, and of their attributes: values, identities, lengths.

    Never raises, whatever an object answers.
    """
    marks: list[Any] = []
    level: Iterable[Any] = makers
    try:
        for _ in range(DEEPEST):
            level = [part for item in level for part in _parts(item)]
            marks += map(_mark, level)
            if len(marks) > MOST_MARKS:
                break
    except Exception:  # an object of the user's may answer anything, and fail at it
        return tuple(marks)
    return tuple(marks)


def _parts(item: Any) -> Iterable[Any]:
    kind = type(item)
    if kind in PLAIN or kind in CLOSED:
        return ()
    if kind in SIZED:
        if len(item) > SHORT or kind is set:
            return ()
        return tuple(item.values()) if kind is dict else tuple(item)
    return tuple(getattr(item, "__dict__", {}).values())


def _mark(part: Any) -> Any:
    kind = type(part)
    if kind in PLAIN:
        return part
    if kind is torch.Tensor:
        return id(part), None if part.is_inference() else part._version
    return (id(part), len(part)) if kind in SIZED else id(part)
