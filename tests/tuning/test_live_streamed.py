"""A streamed data set gets one worker from one pass to the next, where that leaves everything as it is."""

from __future__ import annotations

import gc
import os
import random
import signal
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fulltilt import store
from tests.tuning.live_jobs import HASTY, tuning

SAMPLES = 40


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        for number in range(SAMPLES):
            time.sleep(0.001)
            yield number


class Shuffled(IterableDataset[Any]):
    """Its own generator goes on from pass to pass."""

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        yield from self.generator.sample(range(SAMPLES), SAMPLES)


class CountsPasses(IterableDataset[Any]):
    """Where no look at the data set can see it."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        CountsPasses.passes += 1
        yield from random.Random(CountsPasses.passes).sample(range(SAMPLES), SAMPLES)


class CountsSamples(Stream):
    """The same in each pass, and the script reads its count."""

    drawn = 0

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            CountsSamples.drawn += 1
            yield number


class KnowsItsWorker(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        yield from [int(get_worker_info() is not None)] * SAMPLES


class Draws(IterableDataset[Any]):
    def __iter__(self) -> Iterator[float]:
        yield from (random.random() for _ in range(SAMPLES))


class Lines(IterableDataset[Any]):
    """Opens a file in its first pass, and reads on in the next one."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self) -> Iterator[int]:
        file = OPEN.by_path.setdefault(self.path, os.open(self.path, os.O_RDWR))
        for number in range(SAMPLES):
            os.read(file, 1)
            time.sleep(0.001)
            yield number


OPEN = SimpleNamespace(by_path={})


def passes_of(loader: Any, passes: int = 4) -> list[list[Any]]:
    return [torch.cat(list(loader)).tolist() for _ in range(passes)]


@pytest.mark.parametrize("paid", [True, False])
def test_one_worker_brings_the_same_batches_and_stays_where_it_pays(paid: bool, tmp_path: Path) -> None:
    workers, drawn = [], []
    with tuning(tmp_path, [], [paid]) as one:
        loader = one.trains(DataLoader(Stream(), batch_size=4, pin_memory=True))
        for _ in range(6):
            source: Any = iter(loader)
            workers.append(source._num_workers)
            pool = source.source._pool
            assert pool is None or pool.knobs.pin_memory, "the script's choice"
            drawn.append(torch.cat(list(source)).tolist())
        assert one.record.state == "settled"
        assert one.record.settings.num_workers == int(paid)
        assert [move.outcome for move in one.record.moves] == ["kept" if paid else "returned"]
        assert (tmp_path / store.SETTINGS_FILE).exists() == paid
    assert drawn == [list(range(SAMPLES))] * 6
    assert workers == [0, 0, 1, 0, paid, paid]


def test_where_nothing_can_be_told_of_a_worker_there_is_none(tmp_path: Path) -> None:
    with tuning(tmp_path, [], [None]) as one:
        assert passes_of(one.trains(DataLoader(Stream(), batch_size=4)), 6) == [list(range(SAMPLES))] * 6
        assert one.record.settings.num_workers == 0
        assert "it is undecided whether 1 worker pays" in one.record.why
        assert "the job itself became" in str(one.record.moves[0].why)


def test_what_a_data_set_carries_from_pass_to_pass_is_left_to_it(tmp_path: Path) -> None:
    expected = passes_of(DataLoader(Shuffled(), batch_size=4))
    with tuning(tmp_path, []) as one:
        assert passes_of(one.trains(DataLoader(Shuffled(), batch_size=4))) == expected
        assert one.record.state == "left_alone"
        assert "into the next pass" in one.record.why


def test_what_a_data_set_counts_in_its_class_is_counted_in_the_scripts_process(tmp_path: Path) -> None:
    with tuning(tmp_path, []) as one:
        passes_of(one.trains(DataLoader(CountsSamples(), batch_size=4)), passes=6)
        assert CountsSamples.drawn == 6 * SAMPLES
        assert one.record.state == "left_alone"


@pytest.mark.parametrize(("folder", "is_data"), [(None, True), ("/tmp", False)])
def test_a_file_that_stays_open_is_named_unless_it_is_a_compilers(
    folder: str | None, is_data: bool, tmp_path: Path
) -> None:
    with tempfile.NamedTemporaryFile(dir=folder or tmp_path, prefix="perf-", suffix=".map") as file:
        file.write(bytes(1000))
        file.flush()
        with tuning(tmp_path / "run", [], [True]) as one:
            loader = one.trains(DataLoader(Lines(file.name), batch_size=4))
            assert passes_of(loader) == [list(range(SAMPLES))] * 4
            assert (one.record.state == "left_alone") == is_data
            assert (file.name in one.record.why) == is_data
        os.close(OPEN.by_path.pop(file.name))


def test_passes_that_begin_differently_are_left_alone(tmp_path: Path) -> None:
    random.seed(0)
    expected = passes_of(DataLoader(Draws(), batch_size=4))
    random.seed(0)
    with tuning(tmp_path, [], [True]) as one:
        assert passes_of(one.trains(DataLoader(Draws(), batch_size=4))) == expected
        assert one.record.state == "left_alone"
        assert "begin with different batches" in one.record.why


class FailsInAWorker(Stream):
    """From ``since`` on, in its own way."""

    def __init__(self, how: str, since: int) -> None:
        self.how, self.since = how, since

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            if get_worker_info() is not None and number >= self.since:
                if self.how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.how == "hangs":
                    time.sleep(60)
                raise ValueError("only here")
            yield number


@pytest.mark.parametrize("since", [0, 30])
@pytest.mark.parametrize("how", ["dies", "raises", "hangs"])
def test_where_a_worker_fails_the_training_process_goes_on(how: str, since: int, tmp_path: Path) -> None:
    with tuning(tmp_path, [], [True], limits=replace(HASTY, batch_s=1.0)) as one:
        loader = one.trains(DataLoader(FailsInAWorker(how, since), batch_size=4))
        assert passes_of(loader, 5) == [list(range(SAMPLES))] * 5
        assert one.record.state == "left_alone"
        assert ("1 worker failed" if since else "a worker cannot make its batches") in one.record.why
        assert [move.outcome for move in one.record.moves] == (["failed"] if since else [])


def test_a_data_set_goes_with_its_loader(tmp_path: Path) -> None:
    with tuning(tmp_path, [], [True]) as one:
        loader: Any = one.trains(DataLoader(Stream(), batch_size=4))
        data = weakref.ref(loader.dataset)
        passes_of(loader, 5)
        assert one.record.settings.num_workers == 1
        del loader
        gc.collect()
        deadline_s = time.monotonic() + 20  # the worker ends on another thread
        while data() is not None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert data() is None


def test_where_open_files_are_not_known_a_stream_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Any:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr("fulltilt.tuning.live.streamed.file_positions", refused)
    with tuning(tmp_path, []) as one:
        assert passes_of(one.trains(DataLoader(Stream(), batch_size=4))) == [list(range(SAMPLES))] * 4
        assert "its open files are not known" in one.record.why


def test_what_comes_out_different_in_a_worker_is_left_alone(tmp_path: Path) -> None:
    with tuning(tmp_path, [], [True]) as one:
        assert passes_of(one.trains(DataLoader(KnowsItsWorker(), batch_size=4))) == [[0] * SAMPLES] * 4
        assert one.record.state == "left_alone"
        assert "come out different in a worker" in one.record.why


def test_what_a_class_counts_stays_as_the_script_counts_it(tmp_path: Path) -> None:
    expected = passes_of(DataLoader(CountsPasses(), batch_size=4))
    CountsPasses.passes = 0
    with tuning(tmp_path, [], [True]) as one:
        assert passes_of(one.trains(DataLoader(CountsPasses(), batch_size=4))) == expected
        assert one.record.state == "left_alone"
    assert CountsPasses.passes == 4
