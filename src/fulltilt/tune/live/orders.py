"""The batches of one pass that are still to be made, handed out to pools of workers in the sampler's order.

Nothing here knows torch: an order is what a sampler yields, the indices of one batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from typing import Any


class Orders:
    """What is left of a sampler's pass. Orders that a pool could not fulfil come back to the front."""

    def __init__(self, sampler: Iterator[Any]) -> None:
        self.sampler = sampler
        self._returned: deque[Any] = deque()

    def take(self) -> Any:
        """The next order; StopIteration at the end of the pass."""
        return self._returned.popleft() if self._returned else next(self.sampler)

    def give_back(self, orders: Iterable[Any]) -> None:
        """Put orders, the earliest first, before everything else."""
        self._returned.extendleft(reversed(list(orders)))


class Share:
    """What one pool takes of the orders. It stands where torch's iterator has the sampler's.

    A closed share gives only what was reserved before, so that the pool runs dry and the next one goes on behind it.
    """

    def __init__(self, orders: Orders, is_open: bool) -> None:
        self.is_open = is_open
        self.orders = orders
        self._reserved: deque[Any] = deque()
        self._sent: dict[int, Any] = {}
        self._count = 0

    def __iter__(self) -> Share:
        return self

    def __next__(self) -> Any:
        if self._reserved:
            order = self._reserved.popleft()
        elif self.is_open:
            order = self.orders.take()
        else:
            raise StopIteration
        self._sent[self._count] = order
        self._count += 1
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
