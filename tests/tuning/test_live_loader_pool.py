"""Workers that a script does not know of leave its processes, signals and start method alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from fulltilt.tuning.live.measurement import Knobs
from tests.tuning.live_jobs import Squares, tuning

SIZE = 64


def test_a_forked_child_that_exits_leaves_the_workers_alone(tmp_path: Path) -> None:
    """As one does that saves a checkpoint."""
    drawn = []
    with tuning(tmp_path, [Knobs(2)], clearly=True) as one:
        for count, (_, indices) in enumerate(one.trains(DataLoader(Squares(SIZE), batch_size=2))):
            drawn += indices.tolist()
            if count == 12:
                workers = one.source.pool.iterator._workers
                assert not set(workers) & set(multiprocessing.active_children())
                if not (child := os.fork()):
                    code = 1
                    try:
                        one.source._line.clear()  # torch ends the workers of an iterator that goes
                        util._exit_function()  # type: ignore[attr-defined]
                        code = 0
                    finally:
                        os._exit(code)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                assert len(workers) == 2
                assert all(worker.is_alive() for worker in workers)
        assert [move.outcome for move in one.record.moves] == ["kept"]
    assert drawn == list(range(SIZE))


def test_a_signal_to_the_process_group_runs_the_handler_once(tmp_path: Path) -> None:
    read, write = os.pipe()
    before = signal.signal(signal.SIGUSR1, lambda *_: os.write(write, b"x"))
    try:
        with tuning(tmp_path, [Knobs(2)], clearly=True) as one:
            for count, _ in enumerate(one.trains(DataLoader(Squares(SIZE), batch_size=2))):
                if count == 12:
                    workers = [worker.pid for worker in one.source.pool.iterator._workers]
                    assert len(workers) == 2
                    for process in (os.getpid(), *workers):
                        os.kill(process, signal.SIGUSR1)
            assert [move.outcome for move in one.record.moves] == ["kept"]
        assert os.read(read, 9) == b"x"
    finally:
        signal.signal(signal.SIGUSR1, before)
        os.close(read)
        os.close(write)


def test_a_script_may_set_its_start_method_after_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    with tuning(tmp_path, [Knobs(2)]) as one:
        for _ in one.trains(DataLoader(Squares(SIZE), batch_size=2)):
            pass
        assert [move.outcome for move in one.record.moves] == ["kept"]
    assert multiprocessing.get_start_method(allow_none=True) is None


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_script_that_handles_the_end_of_children_gets_none(
    handler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)  # as in a script without workers
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        with tuning(tmp_path, [Knobs(2)]) as one:
            for _ in one.trains(DataLoader(Squares(SIZE), batch_size=2)):
                pass
            assert (one.record.state, one.record.moves) == ("left_alone", ())
            assert "(SIGCHLD)" in one.record.why
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_thread_that_draws_ahead_starts_no_workers(ahead: bool, tmp_path: Path) -> None:
    """A script's own prefetching: the pass begins on the main thread."""
    with tuning(tmp_path, [Knobs(2)]) as one, ThreadPoolExecutor(1) as thread:
        batches: Any = iter(one.trains(DataLoader(Squares(SIZE), batch_size=2)))
        while (thread.submit(next, batches, None).result() if ahead else next(batches, None)) is not None:
            pass
        assert bool(one.record.moves) is not ahead
        assert ("a thread of the script draws its batches" in one.record.why) is ahead
