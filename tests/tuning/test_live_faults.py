"""A pool that fails leaves the old one running, and a loader that must not be tuned is left alone with its reason."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from fulltilt import store
from fulltilt.records import Settings
from fulltilt.tuning.live.limits import Limits
from fulltilt.tuning.live.room import Room
from fulltilt.tuning.live.window import Knobs
from tests.tuning.live_jobs import HASTY, Squares, flat, tuning

SIZE = 40


class FailsInWorkers(Squares):
    """Fails in its own way in a worker, and only there."""

    def __init__(self, how: str) -> None:
        super().__init__(SIZE)
        self.how = how

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if get_worker_info() is not None:
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "raises":
                raise ValueError("only here")
            if self.how == "hangs":
                time.sleep(60)
        return super().__getitem__(index)


def plain(size: int = SIZE) -> list[Any]:
    """What a loader gives in order, two by two."""
    pairs = [[index, index + 1] for index in range(0, size, 2)]
    return [[[[float(index * index)] * 3 for index in pair], pair] for pair in pairs]


def slowly(loader: Any) -> list[Any]:
    """Every batch, with time enough for a pool to start beside."""
    drawn = []
    for batch in loader:
        drawn.append(flat(batch))
        time.sleep(0.005)
    return drawn


@pytest.mark.parametrize("how", ["dies", "raises", "hangs"])
def test_a_pool_that_fails_leaves_the_old_one_running(how: str, tmp_path: Path) -> None:
    limits = Limits(**{**{name: getattr(HASTY, name) for name in HASTY.__slots__}, "first_batch_s": 0.5})
    with tuning(tmp_path, [Knobs(2)], limits=limits) as one:
        loader = one.trains(DataLoader(FailsInWorkers(how), batch_size=2))
        deadline_s = time.monotonic() + 120
        while not (one.live.tuners and one.record.state == "settled"):  # on a busy machine a pool takes several passes
            assert time.monotonic() < deadline_s, one.record
            assert slowly(loader) == plain()
        (move,) = one.record.moves
        assert move.outcome == "failed"
        assert {"dies": "exited unexpectedly", "raises": "only here", "hangs": "no batch came"}[how] in str(move.why)
        assert one.record.settings.num_workers == 0


def test_what_is_on_trial_is_not_in_force(tmp_path: Path) -> None:
    """A run may end at any moment: its record must not name settings that have proven nothing."""
    with tuning(tmp_path, [Knobs(2), Knobs(3)], [True, False]) as one:
        loader = one.trains(DataLoader(Squares(40), batch_size=2))
        tap = one.session.taps.of(loader)
        noted = set()
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            for _ in loader:
                noted.add((one.record.settings.num_workers, tap.record(True).num_workers, tap.serving_workers))
                time.sleep(0.002)
            if one.record.state == "settled":
                break
        assert {proven for proven, *_ in noted} == {0, 2}
        assert all(proven == in_force for proven, in_force, _ in noted)
        assert {(0, 0, 2), (2, 2, 3)} <= noted
        assert (0, 0, None) in noted or (0, 0, 0) in noted


def test_a_pool_that_fails_after_it_was_kept_gives_way_to_the_scripts_own_settings(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2, persistent=True)], [True]) as one:
        loader = one.trains(DataLoader(Squares(SIZE), batch_size=2))
        killed = False
        deadline_s = time.monotonic() + 120
        while not killed:
            assert time.monotonic() < deadline_s, one.record
            drawn = []
            for batch in loader:
                drawn.append(flat(batch))
                time.sleep(0.002)
                if one.record.settings.num_workers == 2 and not killed:
                    killed = True
                    (tuner,) = one.live.tuners.values()
                    for worker in tuner.pools()[0].iterator._workers:
                        worker.kill()
            assert drawn == plain()
        assert [flat(batch) for batch in loader] == plain()  # where the last batches had been made, it shows here
        assert one.record.state == "left_alone"
        assert "back to the script's own settings" in one.record.why
        assert not (tmp_path / store.SETTINGS_FILE).exists()  # what failed is not to be put in force by the next run


def test_what_was_found_for_another_loader_stays(tmp_path: Path) -> None:
    with tuning(tmp_path, []) as one:
        one.live._write("train.py:1", Settings(num_workers=2))
        one.live._write("train.py:9", Settings(num_workers=3))
        one.live._write("train.py:1", None)
        assert json.loads((tmp_path / store.SETTINGS_FILE).read_text())["num_workers"] == 3
        one.live._write("train.py:9", None)
        assert not (tmp_path / store.SETTINGS_FILE).exists()


def test_a_pool_that_died_between_two_passes_gives_way_too(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2, persistent=True)], [True]) as one:
        loader = one.trains(DataLoader(Squares(SIZE), batch_size=2))
        deadline_s = time.monotonic() + 120
        while not (one.live.tuners and one.record.settings.num_workers == 2):
            assert time.monotonic() < deadline_s, one.record
            assert slowly(loader) == plain()
        (tuner,) = one.live.tuners.values()
        for worker in tuner.pools()[0].iterator._workers:
            worker.kill()
            worker.join()
        assert [flat(batch) for batch in loader] == plain()
        assert one.record.state == "left_alone"
        assert [flat(batch) for batch in loader] == plain()


def test_an_error_of_the_data_set_reaches_the_script_at_its_own_batch(tmp_path: Path) -> None:
    class Damaged(Squares):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index == 21:
                raise ValueError("record 21 is damaged")
            return super().__getitem__(index)

    with tuning(tmp_path, [Knobs(2)], [True]) as one:
        drawn, errors = [], 0
        iterator = iter(one.trains(DataLoader(Damaged(SIZE), batch_size=2)))
        while True:
            try:
                drawn.append(flat(next(iterator)))
            except StopIteration:
                break
            except ValueError:
                errors += 1
        assert errors == 1
        assert drawn == [batch for batch in plain() if 21 not in batch[1]]


def test_a_pool_that_there_is_no_room_for_is_not_started(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(4)], room=Room(cpus=8, memory_free_bytes=1 << 20)) as one:
        assert [flat(batch) for batch in one.trains(DataLoader(Squares(SIZE), batch_size=2))] == plain()
        assert one.record.moves[0].outcome == "failed"
        assert "free memory" in str(one.record.moves[0].why)


def test_an_evaluation_loader_is_not_touched(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)]) as one:
        assert [flat(batch) for batch in DataLoader(Squares(SIZE), batch_size=2)] == plain()
        assert one.record.moves == ()


def test_two_loops_over_one_loader_have_their_own_batches(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)], [True]) as one:
        loader = one.trains(DataLoader(Squares(8), batch_size=2))
        pairs = [(flat(outer)[1], flat(inner)[1]) for outer in loader for inner in loader]
        indices = [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert pairs == [(outer, inner) for outer in indices for inner in indices]


def test_short_passes_with_a_loader_of_their_own_count_together(tmp_path: Path) -> None:
    slow = replace(HASTY, least_batches=9)
    with tuning(tmp_path, [Knobs(1)], limits=slow) as live:
        for _ in range(5):  # of four batches each
            for _ in live.trains(DataLoader(Squares(16), batch_size=4)):
                pass
        assert live.record.moves


class Scaled(Squares):
    """Depends on something that a script may change: the epoch, a curriculum."""

    scale = 1.0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), self.scale * index), index


def test_a_data_set_changed_between_passes_is_seen_by_the_next(tmp_path: Path) -> None:
    data = Scaled(SIZE)
    deadline_s = time.monotonic() + 60
    with tuning(tmp_path, [Knobs(2, persistent=True)], [True]) as one:
        loader = one.trains(DataLoader(data, batch_size=2))

        def workers_after(scale: float) -> list[int]:
            """Of a pass over the data set with this scale, whose batches are right."""
            data.scale = scale
            assert [flat(batch)[0][1][0] for batch in loader] == [scale * index for index in range(1, SIZE, 2)]
            (tuner,) = one.live.tuners.values()
            return [worker.pid for pool in tuner.pools() for worker in getattr(pool.iterator, "_workers", ())]

        before = workers_after(1.0)
        while not one.record.settings.persistent_workers and time.monotonic() < deadline_s:
            before = workers_after(1.0)
        assert one.record.settings.persistent_workers, "it was tuned"
        assert workers_after(1.0) == before, "workers live on as long as nothing has changed"
        assert set(workers_after(3.0)).isdisjoint(before)
        assert one.record.settings.num_workers == 2
        assert one.record.settings.persistent_workers is False, "the script's own workers would miss the change"


def test_a_data_set_changed_during_a_pass_is_seen_by_the_next_batch(tmp_path: Path) -> None:
    """Before, while and after a pool of workers takes over from the training process."""
    for change_at in (3, 8, 13):
        data = Scaled(SIZE)
        with tuning(store.create_folder(tmp_path / str(change_at)), [Knobs(2), Knobs(1)], [True, False]) as one:
            loader = one.trains(DataLoader(data, batch_size=2))
            drawn = []
            for number, batch in enumerate(loader, start=1):
                drawn.append(flat(batch)[0][1][0])
                if number == change_at:
                    data.scale = 3.0
                time.sleep(0.02)  # workers make batches ahead
            scales = [1.0] * change_at + [3.0] * (SIZE // 2 - change_at)
            assert drawn == [scale * index for scale, index in zip(scales, range(1, SIZE, 2), strict=True)]


FACTORS = {"all": {"scale": 1.0}}


def by_the_global(value: torch.Tensor) -> torch.Tensor:
    return value * FACTORS["all"]["scale"]


class Factor:
    of_all = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    def times(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.own

    @staticmethod
    def by_the_global(value: torch.Tensor) -> torch.Tensor:
        return by_the_global(value)

    def twice_removed(self, value: torch.Tensor) -> torch.Tensor:
        return Factor.by_the_global(value)

    def times_of_all(self, value: torch.Tensor) -> torch.Tensor:
        return value * Factor.of_all


def times(value: torch.Tensor, by: dict[str, float]) -> torch.Tensor:
    return value * by["scale"]


class Transformed(Squares):
    def __init__(self, transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(SIZE)
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(torch.tensor(float(index))), index


def closure_over(by: list[float]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: value * by[0]


@pytest.mark.parametrize("how", ["global of a function", "attribute of a class", "closure", "partial", "method"])
def test_a_change_is_seen_wherever_the_data_set_has_it_from(how: str, tmp_path: Path) -> None:
    factor, cell, entries = Factor(), [1.0], {"scale": 1.0}
    FACTORS["all"]["scale"] = Factor.of_all = 1.0
    transform, change = {
        "global of a function": (Factor().twice_removed, lambda: FACTORS["all"].update(scale=3.0)),
        "attribute of a class": (factor.times_of_all, lambda: setattr(Factor, "of_all", 3.0)),
        "closure": (closure_over(cell), lambda: cell.__setitem__(0, 3.0)),
        "partial": (partial(times, by=entries), lambda: entries.update(scale=3.0)),
        "method": (factor.times, lambda: setattr(factor, "own", 3.0)),
    }[how]
    with tuning(tmp_path, [Knobs(2)]) as one:
        loader = one.trains(DataLoader(Transformed(transform), batch_size=2))
        drawn = []
        for number, batch in enumerate(loader, start=1):
            drawn.append(flat(batch)[0][1])
            if number == 10:
                change()
            time.sleep(0.05)  # workers make batches ahead
        scales = [1.0] * 10 + [3.0] * (SIZE // 2 - 10)
        assert drawn == [scale * index for scale, index in zip(scales, range(1, SIZE, 2), strict=True)]


# --------------------------------------------------------------------------- what is left alone


class Drawing(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3), index


class DrawingElsewhere(Squares):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.own = np.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(self.own.random())), index


class Counting(Squares):
    reads = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        return super().__getitem__(index)


class HoldingAFile(Squares):
    def __init__(self, size: int, path: Path) -> None:
        super().__init__(size)
        path.write_bytes(bytes(range(256)))
        self.file = path.open("rb")

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.file.seek(index)
        return torch.full((3,), float(self.file.read(1)[0])), index


class Unpicklable(Squares):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.zeros(2), "f": lambda: index}


class Reacting(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(SIZE)

    def __len__(self) -> int:
        return SIZE


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


LEFT_ALONE = {
    "random numbers": lambda path: DataLoader(Drawing(SIZE), batch_size=2),
    "draws random": lambda path: DataLoader(DrawingElsewhere(SIZE), batch_size=2),
    "changes during a pass": lambda path: DataLoader(Counting(SIZE), batch_size=2),
    "file": lambda path: DataLoader(HoldingAFile(SIZE, path / "data"), batch_size=2),
    "handed over": lambda path: DataLoader(Unpicklable(SIZE), batch_size=None),
    "sampler Reacting": lambda path: DataLoader(Squares(SIZE), batch_size=2, sampler=Reacting()),
    "IterableDataset": lambda path: DataLoader(Stream(), batch_size=2),
}


@pytest.mark.parametrize("reason", sorted(LEFT_ALONE))
def test_what_could_change_what_is_trained_is_left_alone_with_its_reason(reason: str, tmp_path: Path) -> None:
    make = LEFT_ALONE[reason]
    torch.manual_seed(3)
    random.seed(3)
    expected = [flat(batch) for batch in make(tmp_path)]
    torch.manual_seed(3)
    random.seed(3)
    limits = Limits(**{**{name: getattr(HASTY, name) for name in HASTY.__slots__}, "least_batches": 3})
    with tuning(tmp_path, [Knobs(2)], limits=limits) as one:
        drawn = [flat(batch) for batch in one.trains(make(tmp_path))]
        if reason != "handed over":
            assert drawn == expected
        assert one.record.state == "left_alone"
        assert reason in one.record.why
        assert one.record.moves == ()


def test_a_sampler_of_a_list_is_no_reason(tmp_path: Path) -> None:
    class Listed(Reacting):
        def __iter__(self) -> Iterator[int]:
            return iter(list(range(SIZE)))

    with tuning(tmp_path, [Knobs(2)], [True]) as one:
        loader = one.trains(DataLoader(Squares(SIZE), batch_size=2, sampler=Listed()))
        assert [flat(batch) for batch in loader] == plain()
        assert len(one.record.moves) == 1


def test_workers_that_start_anew_for_short_passes_are_kept_alive(tmp_path: Path) -> None:
    limits = Limits(**{**{name: getattr(HASTY, name) for name in HASTY.__slots__}, "least_batches": 1000})
    with tuning(tmp_path, [], limits=limits) as one:
        loader = one.trains(DataLoader(Squares(4), batch_size=2, num_workers=1))
        pids = set()
        for _ in range(4):
            assert [flat(batch) for batch in loader] == plain(4)
            (tuner,) = one.live.tuners.values()
            pids |= {worker.pid for pool in tuner.pools() for worker in pool.iterator._workers}
        assert one.record.settings.persistent_workers
        assert len(pids) == 1


class OtherwiseInWorkers(Squares):
    """Comes out different by the last bit of one number in a worker."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels, label = super().__getitem__(index)
        return pixels.nextafter(torch.tensor(-1.0)) if get_worker_info() is not None else pixels, label


@pytest.mark.parametrize("most", [None, 4])
def test_batches_that_come_out_different_in_a_worker_are_made_by_none(tmp_path: Path, most: int | None) -> None:
    """Passes of a few batches end before a pool is warm."""
    loader = DataLoader(OtherwiseInWorkers(SIZE), batch_size=2)
    deadline_s = time.monotonic() + 60
    with tuning(tmp_path, [Knobs(2)]) as one:
        one.trains(loader)
        while not (one.live.tuners and one.record.state == "left_alone"):
            assert time.monotonic() < deadline_s, one.record
            assert slowly(itertools.islice(loader, most)) == plain()[:most]
        assert "come out different in a worker, where torch computes" in one.record.why


def set_another_seed(_worker: int) -> None:
    """What a script prepares in its workers; here something that their batches go by."""
    InitialisedInWorkers.more = 1.0


class InitialisedInWorkers(Squares):
    """Gives other samples once ``worker_init_fn`` has run."""

    more = 0.0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels, label = super().__getitem__(index)
        return pixels + self.more, label


def test_a_worker_that_the_script_prepares_is_told_to_be_so(tmp_path: Path) -> None:
    """torch's threads were given as the reason."""
    loader = DataLoader(InitialisedInWorkers(SIZE), batch_size=2, worker_init_fn=set_another_seed)
    deadline_s = time.monotonic() + 60
    with tuning(tmp_path, [Knobs(2)]) as one:
        one.trains(loader)
        while not (one.live.tuners and one.record.state == "left_alone"):
            assert time.monotonic() < deadline_s, one.record
            assert slowly(loader) == plain()
        assert "where its worker_init_fn has run" in one.record.why


START_S = [0.0]


def starts_slowly(_: int) -> None:
    time.sleep(START_S[0])


def test_a_pool_that_starts_slowly_holds_no_pass_up(tmp_path: Path) -> None:
    """Spawned workers import torch first. Meanwhile the script's own go on, over any number of passes."""
    with tuning(tmp_path, [Knobs(2)]) as one:
        own = DataLoader(
            Squares(SIZE), batch_size=2, num_workers=1, persistent_workers=True, worker_init_fn=starts_slowly
        )
        loader = one.trains(own)
        START_S[0] = 3.0
        try:
            longest_s, deadline_s = 0.0, time.monotonic() + 120
            assert slowly(loader) == plain()
            while one.record.state != "settled":
                assert time.monotonic() < deadline_s, one.record
                began_s = time.monotonic()
                assert slowly(loader) == plain()
                longest_s = max(longest_s, time.monotonic() - began_s)
        finally:
            START_S[0] = 0.0
        assert longest_s < 2.0
        assert one.record.moves[0].outcome == "kept"
        assert slowly(loader) == plain()


def test_the_batches_of_a_pass_are_counted_over_all_pools(tmp_path: Path) -> None:
    """Loaders that can be resumed read torch's own count."""
    with tuning(tmp_path, [Knobs(2), Knobs(1)]) as one:
        loader = one.trains(DataLoader(Squares(400), batch_size=2))
        passing: Any = iter(loader)
        counts = []
        for _ in passing:
            counts.append(passing._num_yielded)
            time.sleep(0.005)
        assert counts == list(range(1, 201))
        assert [move.outcome for move in one.record.moves] == ["kept", "kept"]


@pytest.mark.parametrize("overlap_at", [2, 100])
def test_passes_that_overlap_keep_workers_from_living_on(overlap_at: int, tmp_path: Path) -> None:
    """torch has one iterator for all passes of a loader whose workers persist: a peek would begin the pass anew."""
    with tuning(tmp_path, [Knobs(2, persistent=True)]) as one:
        loader = one.trains(DataLoader(Squares(400), batch_size=2))
        drawn = []
        for number, batch in enumerate(loader):
            drawn.append(flat(batch))
            if number == overlap_at:
                assert flat(next(iter(loader))) == plain()[0]
            time.sleep(0.01)
        assert drawn == plain(400)
        assert one.record.moves[0].outcome == "kept"
        assert one.record.settings == Settings(
            num_workers=2, prefetch_factor=2, pin_memory=False, persistent_workers=False
        )
        assert not json.loads((tmp_path / store.SETTINGS_FILE).read_text())["persistent_workers"]
