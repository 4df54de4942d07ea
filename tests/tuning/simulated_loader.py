"""A DataLoader with workers that only exists as arithmetic: when each batch comes, and how many lie ready behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple


class Drawn(NamedTuple):
    """One batch as the training loop sees it. ``ready`` batches lie behind it at ``at_s``."""

    asked_s: float
    at_s: float
    ready: int


def draws(
    workers: int,
    prefetch: int,
    make_s: float | Callable[[], float],
    busy_s: Callable[[int], float],
    head_start_s: float = 0.0,
) -> Iterator[Drawn]:
    """Batches without end: each worker makes one in ``make_s``, the loop is busy for ``busy_s(number)`` with each.

    The loop begins to draw ``head_start_s`` after the workers have begun to make.
    """
    free_s = [0.0] * workers
    made_s: list[float] = []

    def order(now_s: float) -> None:
        worker = len(made_s) % workers
        free_s[worker] = max(free_s[worker], now_s) + (make_s() if callable(make_s) else make_s)
        made_s.append(free_s[worker])

    for _ in range(workers * prefetch):
        order(0.0)
    now_s, number = head_start_s, 0
    while True:
        asked_s, now_s = now_s, max(now_s, made_s[number])
        order(now_s)
        number += 1
        yield Drawn(asked_s, now_s, sum(made <= now_s for made in made_s[number:]))
        now_s += busy_s(number)
