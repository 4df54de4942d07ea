"""What a data set does in a process of its own comes back, and one that never answers is not waited for forever."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest

from fulltilt.errors import DataError, MachineError
from fulltilt.feed import worker_pool
from fulltilt.feed.worker_pool import in_child_process
from fulltilt.records import CpuCapacity


def test_results_and_errors_come_back_from_another_process() -> None:
    assert in_child_process(os.getpid, 2) != os.getpid()
    assert in_child_process(os.getpid, 0) == os.getpid()

    def broken() -> int:
        raise DataError("sample 3 is cut", "Copy it anew.")

    with pytest.raises(DataError, match="sample 3 is cut"):
        in_child_process(broken, 2)


def test_a_data_set_that_waits_for_a_thread_that_was_not_copied_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "PATIENCE_S", 0.3)
    with pytest.raises(MachineError, match="within 0 s") as told:
        in_child_process(threading.Event().wait, 2)
    assert "a thread, which a fork does not copy" in str(told.value)
    assert not [child for child in multiprocessing.active_children() if child.name == "fulltilt-feed-check"]


def test_a_process_that_ends_itself_is_named() -> None:
    with pytest.raises(MachineError, match="exit code 5"):
        in_child_process(lambda: os._exit(5), 2)


@pytest.mark.parametrize(
    ("usable", "cores", "ranks", "workers"),
    [(16, 8, 1, 8), (16, 16, 1, 16), (0.5, 8, 1, 1), (16, 8, 4, 2), (3, 8, 1, 3)],
)
def test_one_worker_for_each_core_that_may_be_used(monkeypatch, usable, cores, ranks, workers):
    monkeypatch.setattr(worker_pool, "cpu_capacity", lambda: CpuCapacity(16, 16, None, usable))
    monkeypatch.setattr(worker_pool.psutil, "cpu_count", lambda logical: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert worker_pool.default_workers() == workers
