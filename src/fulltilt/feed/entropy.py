"""How often code has asked the operating system for random numbers.

No seed governs those and no generator's state tells of them: a generator made in mid-sample (``default_rng()``,
``random.Random()``), ``os.urandom``, ``secrets``. What is seeded by the clock, and torch's ``Generator().seed()``, are
not heard here. NumPy's ``RandomState(seed)`` asks first and takes the seed then; that is not counted.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Asked(threading.local):
    times = 0


_asked = _Asked()
_originals: dict[str, Any] = {}
_lock, _listeners = threading.Lock(), 0


def asked() -> int:
    """How often this thread has asked, as far as it was listened to."""
    return _asked.times


@contextmanager
def listened() -> Iterator[None]:
    """Within the block, what is asked for is counted.

    Patches ``os.urandom``, the ``_urandom`` of ``random`` (``secrets`` and NumPy ask through it),
    ``random.Random.seed`` and the ``_MT19937`` of NumPy's ``RandomState``, and puts them back when the last of several
    threads has left its block.
    """
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(more: int) -> None:
    global _listeners
    patched: Any = random
    with _lock:
        _listeners += more
        if more == 1 and _listeners == 1:
            _originals.update(urandom=os.urandom, within_random=patched._urandom, seed=random.Random.seed)
            os.urandom, patched._urandom, patched.Random.seed = _urandom, _urandom_within_random, _seed
            legacy: Any = sys.modules.get("numpy.random.mtrand")
            if legacy is not None:
                _originals["generator"] = legacy._MT19937
                legacy._MT19937 = _seeded_later(legacy._MT19937)
        elif not _listeners:
            if (generator := _originals.pop("generator", None)) is not None:
                sys.modules["numpy.random.mtrand"].__dict__["_MT19937"] = generator
            os.urandom, patched._urandom, patched.Random.seed = _originals.values()


def _urandom(size: int, /) -> bytes:
    _asked.times += 1
    data: bytes = _originals["urandom"](size)
    return data


def _urandom_within_random(size: int, /) -> bytes:
    _asked.times += 1
    data: bytes = _originals["within_random"](size)
    return data


def _seed(self: random.Random, a: Any = None, version: int = 2) -> None:
    _asked.times += a is None
    _originals["seed"](self, a, version)


@functools.cache
def _seeded_later(original: Any) -> Any:
    """NumPy's generator, whose question is taken back where it gets a seed before anything was drawn from it."""

    class EveryOne(type):
        def __instancecheck__(cls, instance: Any) -> bool:  # RandomState asks before it lets an older one be seeded
            return isinstance(instance, original)

    class MT19937(original, metaclass=EveryOne):  # type: ignore[misc] # its name is part of its state
        def __init__(self, seed: Any = None) -> None:
            before = _asked.times
            super().__init__(seed)
            self._asked, self._fresh = _asked.times - before, self.state["state"]

        def _legacy_seeding(self, seed: Any) -> None:
            now = self.state["state"]
            untouched = now["pos"] == self._fresh["pos"] and (now["key"] == self._fresh["key"]).all()
            if seed is not None and untouched:
                _asked.times -= self._asked
            self._asked = 0
            super()._legacy_seeding(seed)

        def __reduce__(self) -> Any:
            make, kind, *rest = super().__reduce__()
            return make, tuple(original if item is MT19937 else item for item in kind), *rest

    return MT19937


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that the fork did not copy may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
