"""A process that a rank starts to train on the side is no rank of the job; real ranks stay, whoever starts them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fulltilt.diagnosis import answer
from fulltilt.diagnosis.evidence import without_side_jobs
from fulltilt.records import Buckets, Run, Span
from tests.diagnosis.examples import rank, run_of


def two_processes(parents_last_s: float = 100.0, **changes: Any) -> Run:
    """One that trains until ``parents_last_s``, and one that it starts, which trains from 40 s to 60 s."""
    alone = run_of(rank(pid=10), data_wait=50.0, compute=50.0)
    above = Span(0.0, parents_last_s, 0, 100, 100, 800, Buckets(compute_s=parents_last_s))
    beside = Span(40.0, 60.0, 0, 4000, 0, None, Buckets(compute_s=20.0))
    child = rank(1, **{"pid": 11, "parent_pid": 10, **changes})
    return replace(alone, ranks=(*alone.ranks, child), spans=((above,), (beside,)))


def test_a_probe_that_a_rank_forks_is_part_of_that_rank() -> None:
    run = two_processes()
    assert [rank.pid for rank in without_side_jobs(run).ranks] == [10]
    assert answer(run).throughput.steps == 100


@pytest.mark.parametrize(
    "run",
    [
        two_processes(parents_last_s=30.0),  # it sought a learning rate, and then started its ranks
        two_processes(world_size=2),  # a rank that the first one forked
        two_processes(parent_pid=9),  # a launcher's
        two_processes(parent_pid=None),  # of an older record
        two_processes(hostname="another"),
    ],
)
def test_ranks_stay(run: Run) -> None:
    assert without_side_jobs(run) is run
