"""A generator that the script gave its RandomSampler: what is read ahead must not move it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import RandomSampler


class OwnGenerator:
    """RandomSampler draws a permutation when a pass begins, and one more, for nothing, after its last index.

    Reading ahead meets that second draw early. It is taken back, and made up for when the script's own loader meets it.
    """

    def __init__(self, sampler: RandomSampler) -> None:
        self.owes = False
        self._generator: torch.Generator = sampler.generator
        self._entries = len(sampler.data_source)

    def early(self, sampler: Iterator[Any]) -> Any:
        """The sampler's next order, with the generator put back to where it was."""
        before = self._generator.get_state()
        try:
            return next(sampler)
        finally:
            if not torch.equal(self._generator.get_state(), before):
                self._generator.set_state(before)
                self.owes = True

    def catch_up(self) -> None:
        """Draw the permutation that was taken back."""
        torch.randperm(self._entries, generator=self._generator)
        self.owes = False


def own_generator(sampler: Any) -> OwnGenerator | None:
    """The script's own generator behind a loader's sampler, if a RandomSampler draws from one."""
    while not isinstance(sampler, RandomSampler):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if sampler is None:
            return None
    return OwnGenerator(sampler) if sampler.generator is not None else None
