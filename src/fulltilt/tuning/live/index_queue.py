"""The index batches of one pass, drawn from the script's own sampler at the pace of the plain run.

Nothing here knows workers: pools take index batches from it, in the sampler's order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

# These fix their whole order when the first index is drawn, whatever happens afterwards.
FIXED_AT_ONCE = (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
# Accelerate's wrappers pass on what the sampler inside gives.
WRAPPERS = {"BatchSamplerShard": "batch_sampler", "SkipBatchSampler": "batch_sampler"}
OVER_A_SEQUENCE: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


class IndexQueue:
    """What is left of a sampler's pass. What a pool took and did not make comes back to the front.

    A script that leaves a pass early finds its sampler as far as its own loader would have read it, which is ``depth``
    batches ahead (workers times prefetch). A pool with less never falls behind that pace, and what one with more reads
    ahead of it is hidden from the script's generator until then.
    """

    def __init__(self, indices: Iterator[Any], depth: int = 0, sampler: Any = None) -> None:
        self.indices = indices
        self.failed = False  # the sampler has raised an error
        self._depth = depth
        self._random_sampler = _with_own_generator(sampler)
        self._stock: deque[Any] = deque()
        self._drawn = 0
        self._asked = 0
        self._pace: float = depth
        self._owed_at: int | None = None
        self._ended = False
        self._keep_up()

    def take(self) -> Any:
        """The next index batch; StopIteration at the end of the pass."""
        return self._stock.popleft() if self._stock else self._draw()

    def give_back(self, batches: Iterable[Any]) -> None:
        """Put index batches, the earliest first, before everything else."""
        self._stock.extendleft(reversed(list(batches)))

    def asked(self) -> None:
        """The script asks for its next batch."""
        self._asked += 1
        self._go(max(self._depth + self._asked - 1, self._asked))

    def given(self) -> None:
        """The script gets it, or its error. Workers are sent the next indices just before."""
        if self._depth:
            self._go(self._depth + self._asked)

    def over(self) -> None:
        """The script was told that the pass is over."""
        self._go(math.inf)

    def _go(self, pace: float) -> None:
        self._pace = pace
        self._keep_up()

    def _keep_up(self) -> None:
        while self._drawn < self._pace and not self._ended:
            try:
                self._stock.append(self._draw())
            except StopIteration:
                break
        if self._owed_at is not None and self._owed_at <= self._pace:
            assert self._random_sampler is not None
            self._owed_at = None
            torch.randperm(len(self._random_sampler.data_source), generator=self._random_sampler.generator)

    def _draw(self) -> Any:
        self._drawn += 1
        try:
            return next(self.indices) if self._drawn <= self._pace else self._draw_early()
        except StopIteration:
            self._ended = True
            raise
        except Exception:
            self.failed = True
            raise

    def _draw_early(self) -> Any:
        """RandomSampler draws one more permutation, for nothing, after its last index. A generator of the script's own
        is put back then, and that permutation is drawn from it when the plain run does."""
        if self._random_sampler is None:
            return next(self.indices)
        generator = self._random_sampler.generator
        before = generator.get_state()
        try:
            return next(self.indices)
        finally:
            if not torch.equal(generator.get_state(), before):
                generator.set_state(before)
                self._owed_at = self._drawn if self._owed_at is None else self._owed_at


def _with_own_generator(sampler: Any) -> RandomSampler | None:
    """The RandomSampler behind a loader's sampler, if it draws from a generator of the script's own."""
    while sampler is not None and not isinstance(sampler, RandomSampler):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return sampler if sampler is not None and sampler.generator is not None else None


def reason_of_sampler(sampler: Any, iterator: Any) -> str | None:
    """Why a sampler may not be read further ahead than the script itself does; ``iterator`` is its own, under way."""
    kind = type(sampler)
    if isinstance(iterator, OVER_A_SEQUENCE) or any(kind.__iter__ is known.__iter__ for known in FIXED_AT_ONCE):
        return None
    if isinstance(sampler, RandomSampler) and (kind.__iter__ is RandomSampler.__iter__ or _of_accelerate(kind)):
        # With a generator of the script's own, later permutations of one pass are drawn from it when they are needed.
        later = sampler.replacement or sampler.num_samples > len(sampler.data_source)
        if sampler.generator is not None and later:
            return "its RandomSampler draws from the script's own generator during the pass"
        return None
    if kind.__iter__ is BatchSampler.__iter__:
        inner = getattr(iterator, "gi_frame", None)
        return reason_of_sampler(sampler.sampler, inner and inner.f_locals.get("sampler_iter"))
    if _of_accelerate(kind) and kind.__name__ in WRAPPERS:
        return reason_of_sampler(getattr(sampler, WRAPPERS[kind.__name__]), None)
    if isinstance(sampler, list | tuple | range):
        return None
    return (
        f"its sampler {kind.__name__} may depend on what training does between two batches, "
        "so it must not be read further ahead"
    )


def _of_accelerate(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "accelerate"
