"""How often code has asked the operating system for random numbers.

No seed governs those and no generator's state tells of them: a generator made in mid-sample (``default_rng()``,
``random.Random()``), ``os.urandom``, ``secrets``. What is seeded by the clock, and torch's ``Generator().seed()``, are
not heard here.
"""

from __future__ import annotations

import os
import random
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

    Patches ``os.urandom``, the ``_urandom`` of ``random`` (``secrets`` and NumPy ask through it) and
    ``random.Random.seed``, and puts them back when the last of several threads has left its block.
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
        elif not _listeners:
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


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that the fork did not copy may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
