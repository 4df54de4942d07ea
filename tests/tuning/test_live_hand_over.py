"""From one setting to the next: no more work under way than CPUs are for, and no other workers for another queue."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fulltilt.tuning.live.pools import Pool
from fulltilt.tuning.live.window import Knobs
from tests.tuning.live_jobs import HASTY, Squares, Tuning, flat, tuning

SIZE = 120


class Timed(Squares):
    """Each sample says from when to when it was made."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        began_s = time.monotonic()
        time.sleep(0.03)
        return torch.tensor([began_s, time.monotonic()], dtype=torch.float64), index


def most_at_once(times: list[list[float]]) -> int:
    """How many samples were being made at the same moment."""
    return max(sum(began <= moment < ended for began, ended in times) for moment, _ in times)


@pytest.mark.parametrize("keeps", [True, False])
def test_the_next_pool_gets_what_the_one_before_has_no_more_work_for(keeps: bool, tmp_path: Path) -> None:
    """Two pools at work at once would make late batches at the cost of the next ones."""
    with tuning(tmp_path, [Knobs(3, 4)], [keeps]) as one:
        loader = one.trains(DataLoader(Timed(4 * SIZE), batch_size=None, num_workers=4, prefetch_factor=4))
        made, indices = zip(*((flat(times), index) for times, index in loader), strict=True)
        assert indices == tuple(range(4 * SIZE))
        assert [move.outcome for move in one.record.moves] == ["kept" if keeps else "returned"]
        assert most_at_once(list(made)) <= 5  # what a worker has made is on its way while it begins the next


def draw(one: Tuning, loader: Any, until_settled: bool, look: Callable[[Pool], None]) -> None:
    """A pass, or passes until nothing is tried any more, each of them with the right batches."""
    wanted = [[[[float(index * index)] * 3], [index]] for index in range(SIZE)]
    deadline_s = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline_s, one.record
        drawn = []
        for batch in loader:
            drawn.append(flat(batch))
            time.sleep(0.002)
            pool = next(iter(one.live.tuners.values())).pools()[0]
            if pool.knobs.workers:
                look(pool)
        assert drawn == wanted
        if not until_settled or one.record.state == "settled":
            return


@pytest.mark.parametrize("keeps", [True, False])
def test_a_deeper_queue_needs_no_other_workers(keeps: bool, tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2, 2), Knobs(2, 6)], [True, keeps]) as one:
        loader = one.trains(DataLoader(Squares(SIZE), batch_size=1))
        workers: set[int] = set()
        owed: list[int] = []

        def look(pool: Pool) -> None:
            workers.update(worker.pid for worker in pool.iterator._workers)
            owed.append(len(pool.iterator._task_info))

        draw(one, loader, True, look)
        assert [move.outcome for move in one.record.moves] == ["kept", "kept" if keeps else "returned"]
        assert one.record.settings.prefetch_factor == (6 if keeps else 2)
        assert max(owed) == 12
        owed.clear()
        draw(one, loader, False, look)
        assert max(owed) == (12 if keeps else 4)
        assert len(workers) == 2


def test_a_pool_that_fails_with_a_deeper_queue_gives_way_to_one_with_the_best_settings(tmp_path: Path) -> None:
    limits = dataclasses.replace(HASTY, least_batches=60)  # so that the trial lasts until the failure is noticed
    with tuning(tmp_path, [Knobs(2, 2, persistent=True), Knobs(2, 6, persistent=True)], [True], limits) as one:
        loader = one.trains(DataLoader(Squares(SIZE), batch_size=1))
        killed: list[Pool] = []

        def kill_once(pool: Pool) -> None:
            if pool.knobs.prefetch == 6 and not killed:
                killed.append(pool)
                for worker in pool.iterator._workers:
                    worker.kill()

        draw(one, loader, True, kill_once)
        assert [move.outcome for move in one.record.moves] == ["kept", "failed"]
        assert (one.record.settings.num_workers, one.record.settings.prefetch_factor) == (2, 2)
        draw(one, loader, False, kill_once)
