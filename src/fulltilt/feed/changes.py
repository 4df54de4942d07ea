"""Whether somebody has changed a data set since it was read: new labels, another transform, a setting.

Samples that are kept cannot tell, and comparing a few of them with the data set finds only what changes many.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fulltilt.feed.generators import reached
from fulltilt.feed.own_code import names_in, own_module
from fulltilt.feed.untouched import objects_in

# Looked into at the start of every epoch: arrays of labels, not of pictures; lists of files, not of a million.
_ARRAY_BYTES = 16 * 1024**2
_LIST_ENTRIES = 200_000
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_HASHED = frozenset({*_PLAIN, tuple})


@dataclass(frozen=True)
class State:
    """``settings``: plain attributes, by place. ``contents``: what the others are, and what lies in them."""

    settings: dict[tuple[int, str], Any]
    contents: dict[tuple[int, str], Any]

    def changed(self, now: State) -> str | None:
        """The name of an attribute whose content was exchanged or changed since; None if there is none."""
        return next((place[1] for place in now.contents if now.contents[place] != self.contents.get(place)), None)

    def set_anew(self, now: State) -> set[str]:
        """The names of settings that have another value since."""
        return {place[1] for place, value in now.settings.items() if _differ(self.settings.get(place, value), value)}


def _differ(before: Any, value: Any) -> bool:
    return before is not value and before != value and not (before != before and value != value)  # NaN stays NaN


class Watch:
    """Looks at ``dataset``, the objects that it is made of, and the globals that its code uses."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._globals = list(_globals_used(dataset))  # which ones follows from the code, and that stays

    def now(self) -> State:
        """All of it as it is now."""
        settings = {
            (id(module), name): module[name] for module, name in self._globals if isinstance(module.get(name), _PLAIN)
        }
        contents: dict[tuple[int, str], Any] = {}
        for item in objects_in(self._dataset):
            for name, value in [*_of_class(type(item)), *vars(item).items()]:
                if isinstance(value, _PLAIN):
                    settings[id(item), name] = value
                elif (plain := _as_plain(value)) is not None:
                    settings[id(item), name] = plain
                else:
                    contents[id(item), name] = id(value), _content(value)
        return State(settings, contents)


def _globals_used(dataset: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Plain globals that functions in reach look up in their own module, or in a module of the user's."""
    for function in reached([dataset]):
        if not isinstance(function, types.FunctionType) or not own_module(function.__module__):
            continue
        names, here = names_in(function.__code__), function.__globals__
        modules = [here.get(name) for name in names]
        for module in [here, *(vars(m) for m in modules if isinstance(m, types.ModuleType) and own_module(m.__name__))]:
            yield from ((module, name) for name in names if name in module and isinstance(module[name], _PLAIN))


def _of_class(cls: type) -> Iterator[tuple[str, Any]]:
    for base in reversed(cls.__mro__):
        if own_module(base.__module__):
            yield from (pair for pair in vars(base).items() if isinstance(pair[1], _PLAIN) and pair[0][:2] != "__")


def _as_plain(value: Any) -> Any:
    """A dict of settings, or a number that processes share, as something to compare; None for anything else."""
    if isinstance(value, dict | types.MappingProxyType):  # others may read what they are asked for from a file
        small = len(value) <= _LIST_ENTRIES and all(isinstance(item, _PLAIN) for item in value.values())
        return tuple(value.items()) if small else None
    if type(value).__module__ == "multiprocessing.sharedctypes":
        shared = getattr(value, "value", None)
        return shared if isinstance(shared, _PLAIN) else None
    return None


def _content(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, list | tuple):
        plain = len(value) <= _LIST_ENTRIES and _HASHED.issuperset(map(type, value))
        try:
            return hash(tuple(value)) if plain else len(value)
        except TypeError:  # a tuple of tensors
            return len(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return _sum(value) if value.nbytes <= _ARRAY_BYTES and value.dtype.kind != "O" else None
    return None


def _sum(array: Any) -> int:
    bare = getattr(array, "flags", None) is not None and array.flags.c_contiguous and array.dtype.kind in "biuf"
    return zlib.adler32(array if bare else array.tobytes())
