"""Samplers with a random generator of their own, asked for any epoch: a run that goes on in the fifth has to get it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fulltilt.feed.generators import Generators, is_generator


def replayable(sampler: Any) -> Any:
    """``sampler``, which gives the samples of whatever epoch it is told, also where a generator of its own decides."""
    own = list(_generators_of(sampler))
    return _Replayed(sampler, own) if own else sampler


class _Replayed:
    """Epochs asked for in turn are taken as they come, as a DataLoader does; for any other they are drawn anew."""

    def __init__(self, sampler: Any, own: list[Any]) -> None:
        self._sampler = sampler
        self._own = Generators(*own)
        self._at_first = self._own.state()
        self._next = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked by pickle before there is a sampler
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self._next += 1
        return iter(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of ``epoch``."""
        with Generators().untouched():
            if epoch < self._next:
                self._own.restore(self._at_first)
                self._next = 0
            while self._next < epoch:
                self._tell(self._next)
                for _ in self:
                    pass
        self._tell(epoch)

    def _tell(self, epoch: int) -> None:
        tell = getattr(self._sampler, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def _generators_of(sampler: Any) -> Iterator[Any]:
    """Those that the sampler itself holds, and the sampler within a batch sampler; not those of the data set."""
    while sampler is not None:
        yield from (value for value in getattr(sampler, "__dict__", {}).values() if is_generator(value))
        sampler = getattr(sampler, "sampler", None)
