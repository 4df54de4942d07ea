"""Whether somebody has changed a data set since it was read: new labels, another transform, a setting.

Samples that are kept cannot tell, and comparing a few of them with the data set finds only what changes many.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

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


def state_of(dataset: Any) -> State:
    """``dataset`` as it is now, and the objects that it is made of."""
    settings: dict[tuple[int, str], Any] = {}
    contents: dict[tuple[int, str], Any] = {}
    for item in objects_in(dataset):
        for name, value in [*vars(item).items()]:
            if isinstance(value, _PLAIN):
                settings[id(item), name] = value
            else:
                contents[id(item), name] = id(value), _content(value)
    return State(settings, contents)


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
