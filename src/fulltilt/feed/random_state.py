"""Every random generator in reach of a data set: the global ones of random, numpy and torch, and its own instances."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fulltilt.feed.handles import reached


class Generators:
    """The generators in reach of ``root``, whose states can be read, set from a seed, and put back."""

    def __init__(self, *roots: Any) -> None:
        self.instances = list(find_generators(roots))

    def mark(self) -> tuple[Any, ...]:
        """Something that changes whenever one of them is drawn from; cheap enough for every sample."""
        numpy = sys.modules.get("numpy")
        return (
            random.getstate(),
            _tensor_bytes(torch.default_generator.get_state()),
            _numpy_bytes(numpy) if numpy is not None else None,
            *(_mark(instance) for instance in self.instances),
        )

    def state(self) -> list[Any]:
        """The state of each, for ``restore``."""
        numpy = sys.modules.get("numpy")
        return [
            random.getstate(),
            torch.default_generator.get_state(),
            numpy.random.get_state() if numpy is not None else None,
            *(_get(instance) for instance in self.instances),
        ]

    def restore(self, state: Sequence[Any]) -> None:
        """Put every generator back to ``state``."""
        numpy = sys.modules.get("numpy")
        random.setstate(state[0])
        torch.default_generator.set_state(state[1])
        if numpy is not None and state[2] is not None:
            numpy.random.set_state(state[2])
        for instance, value in zip(self.instances, state[3:], strict=True):
            _set(instance, value)

    def seed(self, seed: int) -> None:
        """Start every generator from the 32-bit ``seed``, the data set's own instances included.

        Forked workers would otherwise all repeat the same numbers from an instance.
        """
        numpy = sys.modules.get("numpy")
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        _seed_worker_info(seed)
        for position, instance in enumerate(self.instances):
            _seed(instance, (seed + 0x9E3779B9 * (position + 1)) & 0xFFFFFFFF)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Leave every generator as it was found."""
        before = self.state()
        try:
            yield
        finally:
            self.restore(before)


def find_generators(roots: Sequence[Any]) -> Iterator[Any]:
    """Generator instances in the attributes, classes, containers, closures and used globals of ``roots``."""
    return (item for item in reached(roots) if is_generator(item))


def is_generator(item: Any) -> bool:
    """Whether ``item`` is a generator of random numbers other than the global ones."""
    numpy = sys.modules.get("numpy")
    if isinstance(item, random.Random) and not isinstance(item, random.SystemRandom):
        return getattr(random.random, "__self__", None) is not item  # the global one is always watched
    if isinstance(item, torch.Generator):
        return item is not torch.default_generator and item.device.type == "cpu"
    if numpy is None:
        return False
    if isinstance(item, numpy.random.RandomState):
        return item is not numpy.random.mtrand._rand
    return isinstance(item, numpy.random.Generator)


def _mark(instance: Any) -> Any:
    state = _get(instance)
    return _tensor_bytes(state) if isinstance(state, torch.Tensor) else pickle.dumps(state)


def _tensor_bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _numpy_bytes(numpy: Any) -> Any:
    """The Mersenne twister behind ``numpy.random``: 624 words and a position, read where they lie."""
    generator = numpy.random.mtrand._rand._bit_generator
    if type(generator).__name__ != "MT19937":  # exchanged with numpy.random.set_bit_generator
        return pickle.dumps(generator.state)
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


def _get(instance: Any) -> Any:
    if isinstance(instance, random.Random):
        return instance.getstate()
    if isinstance(instance, torch.Generator):
        return instance.get_state()
    return instance.bit_generator.state if hasattr(instance, "bit_generator") else instance.get_state()


def _set(instance: Any, state: Any) -> None:
    if isinstance(instance, random.Random):
        instance.setstate(state)
    elif isinstance(instance, torch.Generator):
        instance.set_state(state)
    elif hasattr(instance, "bit_generator"):
        instance.bit_generator.state = state
    else:
        instance.set_state(state)


def _seed(instance: Any, seed: int) -> None:
    if isinstance(instance, random.Random):
        instance.seed(seed)
    elif isinstance(instance, torch.Generator):
        instance.manual_seed(seed)
    elif hasattr(instance, "bit_generator"):
        instance.bit_generator.state = type(instance.bit_generator)(seed).state
    else:
        instance.seed(seed)


def _seed_worker_info(seed: int) -> None:
    """Let ``get_worker_info().seed`` be this one: a DataLoader's differs from pass to pass too."""
    info: Any = torch.utils.data.get_worker_info()
    if info is not None and hasattr(info, "seed_of_sample"):
        info.seed_of_sample = seed
