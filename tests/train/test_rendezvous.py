"""Ranks that meet in a store with the traces of earlier starts in it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from fulltilt.train.distributed import agree_on_start_name


def meet(store: Any, world: int, order: list[int]) -> set[str]:
    with ThreadPoolExecutor(world) as pool:
        return set(pool.map(lambda rank: agree_on_start_name(store, rank, world, 10.0), order))


def test_every_start_gets_a_name_of_its_own_whoever_comes_first() -> None:
    store = dist.HashStore()
    names = [meet(store, 3, order) for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0])]
    assert all(len(name) == 1 for name in names)
    assert len(set.union(*names)) == 3


def test_a_dead_rank_that_asked_is_not_taken_for_one_that_came() -> None:
    """Seen to fail: counting questions instead of answers that were read, the first rank goes on alone."""
    store = dist.HashStore()
    store.set("fulltilt/ranks-2/asks-1", "a rank that died after it asked")
    with pytest.raises(RuntimeError, match="1 of 2 ranks did not come, among them rank 1"):
        agree_on_start_name(store, 0, 2, 0.1)
    assert len(meet(store, 2, [0, 1])) == 1
