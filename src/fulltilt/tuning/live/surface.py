"""The outermost parts of a data set, cheap enough to look at before every batch.

Workers have the data set as it was when they were forked. A script without workers may change its own in the middle of
a pass (a curriculum, a transform that is switched off, a global that its code reads) and sees that in the next batch.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fulltilt.tuning.live.reach import contents, globals_of

DEEPEST = 8  # a subset's data set's transform's list of lists of transforms' probability
MOST_MARKS = 64
SHORT = 16
SMALL_BYTES = 1024
# By their very type: looking it up is ten times as fast as isinstance, and this is done for every batch.
PLAIN = frozenset((str, bytes, int, float, bool, type(None)))
SIZED = frozenset((list, tuple, dict, set))
# What a name is given by an import or a definition stays.
DEFINED = frozenset((types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type))
CLOSED = DEFINED | {torch.Tensor}
# Where the globals of code stand. A function may hold on to much that its script is done with, a class hardly.
Homes = tuple[tuple[Mapping[str, Any], str], ...]
_of_functions: WeakKeyDictionary[types.FunctionType, Homes] = WeakKeyDictionary()
_of_classes: dict[type, Homes] = {}


def surface(*makers: Any) -> tuple[Any, ...]:
    """Marks of the attributes of what makes a batch, and of their attributes: values, identities, lengths.

    Never raises, whatever an object answers.
    """
    marks: list[Any] = []
    level: Iterable[Any] = makers
    try:
        for _ in range(DEEPEST):
            following = []
            for item in level:
                for part in _parts(item):
                    if type(part) in PLAIN:
                        marks.append(part)
                    else:
                        marks.append(_mark(part))
                        following.append(part)
            if len(marks) > MOST_MARKS:
                break
            level = following
    except Exception:  # an object of the user's may answer anything, and fail at it
        return tuple(marks)
    return tuple(marks)


def _parts(item: Any) -> Iterable[Any]:
    kind = type(item)
    if kind in SIZED:
        if len(item) > SHORT or kind is set:
            return ()
        return item.values() if kind is dict else item  # type: ignore[no-any-return]
    if kind is types.FunctionType:
        return (*_globals(item), *contents(item)) if item.__closure__ else _globals(item)
    if kind is types.MethodType:
        return item.__self__, item.__func__
    if kind is partial:
        return item.func, item.args, item.keywords
    if kind in CLOSED:
        return ()
    own, read = getattr(item, "__dict__", {}).values(), _globals(kind)
    return (*own, *read) if read else own


def _globals(code: types.FunctionType | type) -> list[Any]:
    """The present values of the globals that a function, or the methods of a class, read."""
    known: Any = _of_classes if isinstance(code, type) else _of_functions
    homes = known.get(code)
    if homes is None:
        found = [(home, name) for home, name in globals_of(code) if type(home.get(name)) not in DEFINED]
        homes = known[code] = tuple(found)
    return [home.get(name) for home, name in homes] if homes else []


def _mark(part: Any) -> Any:
    kind = type(part)
    if kind is torch.Tensor:
        return id(part), None if part.is_inference() else part._version
    if kind in SIZED:
        return id(part), len(part)
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and part.nbytes <= SMALL_BYTES:
        return part.tobytes()
    return id(part)
