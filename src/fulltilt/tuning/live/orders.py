"""The batches of one pass that are still to be made, handed out to pools of workers in the sampler's order.

Nothing here knows torch: an order is what a sampler yields, the indices of one batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Iterator
from typing import Any, Protocol


class Hidden(Protocol):
    """A random generator of the script's that is not to notice what is drawn before its time."""

    owes: bool

    def early(self, sampler: Iterator[Any]) -> Any:
        """The sampler's next order. If the generator was drawn from, it is put back and owes that."""

    def catch_up(self) -> None:
        """Draw what it owes."""


class Orders:
    """What is left of a sampler's pass. Orders that a pool could not fulfil come back to the front.

    A script that leaves a pass early finds its sampler as far as its own loader would have read it, which is ``depth``
    batches ahead (workers by prefetch). So a pool with less never falls behind that pace, and what one with more
    reads ahead of it is hidden from the script's generator until then.
    """

    def __init__(self, sampler: Iterator[Any], depth: int, drawn: int = 0, generator: Hidden | None = None) -> None:
        self.sampler = sampler
        self._depth = depth
        self._generator = generator
        self._stock: deque[Any] = deque()
        self._drawn = drawn
        self._asked = 0
        self._pace: float = depth
        self._owed_at: int | None = None
        self._ended = False
        self._keep_up()

    def take(self) -> Any:
        """The next order; StopIteration at the end of the pass."""
        return self._stock.popleft() if self._stock else self._draw()

    def give_back(self, orders: Iterable[Any]) -> None:
        """Put orders, the earliest first, before everything else."""
        self._stock.extendleft(reversed(list(orders)))

    def asked(self) -> None:
        """The script asks for its next batch."""
        self._asked += 1
        self._go(max(self._depth + self._asked - 1, self._asked))

    def given(self) -> None:
        """The script gets it. Workers are sent the next order just before."""
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
            assert self._generator is not None
            self._owed_at = None
            self._generator.catch_up()

    def _draw(self) -> Any:
        self._drawn += 1
        early = self._generator if self._drawn > self._pace else None
        try:
            return next(self.sampler) if early is None else early.early(self.sampler)
        except StopIteration:
            self._ended = True
            raise
        finally:
            if early is not None and early.owes and self._owed_at is None:
                self._owed_at = self._drawn


class Share:
    """What one pool takes of the orders. It stands where torch's iterator has the sampler's.

    A closed share gives only what was reserved before, so that the pool runs dry and the next one goes on behind it.
    ``first`` is torch's number for the next order.
    """

    def __init__(self, orders: Orders, is_open: bool, first: int = 0) -> None:
        self.is_open = is_open
        self.orders = orders
        self._reserved: deque[Any] = deque()
        self._sent: dict[int, Any] = {}
        self._next = first

    def __iter__(self) -> Share:
        return self

    def __next__(self) -> Any:
        if self._reserved:
            order = self._reserved.popleft()
        elif self.is_open:
            order = self.orders.take()
        else:
            raise StopIteration
        self._sent[self._next] = order
        self._next += 1
        return order

    @property
    def empty(self) -> bool:
        """Whether nothing more will come out of it."""
        return not self.is_open and not self._reserved

    def close(self, reserve: int = 0) -> None:
        """Take ``reserve`` more orders for this pool, and no others."""
        self.is_open = False
        for _ in range(reserve):
            try:
                self._reserved.append(self.orders.take())
            except StopIteration:
                return

    def reserve(self, orders: Iterable[Any]) -> None:
        """Give this pool orders that come before all others."""
        self._reserved.extend(orders)

    def keep_only(self, owed: Container[int]) -> None:
        """Forget the orders that have been fulfilled; ``owed`` are the numbers of those that have not."""
        self._sent = {number: order for number, order in self._sent.items() if number in owed}

    def unfulfilled(self) -> list[Any]:
        """Orders that were taken and not fulfilled, the earliest first."""
        return [order for _, order in sorted(self._sent.items())] + list(self._reserved)
