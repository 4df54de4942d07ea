"""A pool that fails leaves the old one running, and a loader that must not be tuned is left alone with its reason."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from fulltilt import store
from fulltilt.records import Settings
from fulltilt.tuning.live.measurement import Knobs, Measurement
from fulltilt.tuning.live.tuner import Phase
from tests.tuning.live_jobs import HASTY, Squares, Tuning, flat, tuning

SIZE = 40


def plain(size: int = SIZE) -> list[Any]:
    """What a loader gives in order, two by two."""
    pairs = [[index, index + 1] for index in range(0, size, 2)]
    return [[[[float(index * index)] * 3 for index in pair], pair] for pair in pairs]


def drawn_from(loader: Any) -> list[Any]:
    return [flat(batch) for batch in loader]


def kill_workers(one: Tuning) -> None:
    for worker in one.source.pool.iterator._workers:
        worker.kill()
        worker.join()


class FailsInWorkers(Squares):
    """Fails in its own way in a worker, and only there; not before ``since`` batches, so that a check sees nothing."""

    def __init__(self, how: str, since: int) -> None:
        super().__init__(SIZE)
        self.how = how
        self.since = since

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if get_worker_info() is not None and index >= 2 * self.since:
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "raises":
                raise ValueError("only here")
            time.sleep(60)
        return super().__getitem__(index)


# Of a worker that dies while it hands over a batch, torch tells either.
WHY = {"dies": "exited unexpectedly|Connection reset", "raises": "only here", "hangs": "timed out"}


@pytest.mark.parametrize("how", ["dies", "raises", "hangs"])
@pytest.mark.slow
def test_a_data_set_that_fails_in_a_worker_is_left_alone(how: str, tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)], limits=replace(HASTY, batch_s=2.0)) as one:
        loader = one.trains(DataLoader(FailsInWorkers(how, 0), batch_size=2))
        assert drawn_from(loader) == plain()
        assert (one.record.state, one.record.moves) == ("left_alone", ())
        assert re.search(WHY[how], one.record.why)
        assert drawn_from(loader) == plain()


@pytest.mark.parametrize("how", ["dies", "raises", "hangs"])
def test_a_pool_that_fails_leaves_the_old_one_running(how: str, tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)], limits=replace(HASTY, batch_s=2.0, least_batches=9)) as one:
        loader = one.trains(DataLoader(FailsInWorkers(how, 14), batch_size=2))
        assert drawn_from(loader) == plain()
        (move,) = one.record.moves
        assert move.outcome == "failed"
        assert re.search(WHY[how], str(move.why))
        assert one.record.settings.num_workers == 0
        assert one.record.state == ("left_alone" if how == "raises" else "settled")
        assert drawn_from(loader) == plain()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_kept_pool_that_fails_gives_way_to_the_scripts_own_settings(workers: int, tmp_path: Path) -> None:
    arguments: Any = {"num_workers": 1, "persistent_workers": True} if workers else {}
    with tuning(tmp_path, [Knobs(2)], limits=replace(HASTY, batch_s=2.0)) as one:
        loader = one.trains(DataLoader(Squares(SIZE), batch_size=2, **arguments))
        killed, drawn = False, []
        for batch in loader:
            drawn.append(flat(batch))
            pool = one.source.pool
            if one.record.settings.num_workers == 2 == pool.knobs.num_workers and pool.is_serving and not killed:
                assert (tmp_path / store.SETTINGS_FILE).exists()
                kill_workers(one)
                killed = True
        assert killed
        assert drawn == plain()
        assert one.record.state == "left_alone"
        assert one.record.settings == one.record.before
        assert "back to the script's own settings" in one.record.why
        assert not (tmp_path / store.SETTINGS_FILE).exists()  # what failed is not to be put in force by the next run
        assert drawn_from(loader) == drawn_from(loader) == plain()


def test_workers_that_died_between_two_passes_are_replaced(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)], limits=replace(HASTY, batch_s=2.0)) as one:
        loader = one.trains(DataLoader(Squares(SIZE), batch_size=2, num_workers=1, persistent_workers=True))
        assert drawn_from(loader) == plain()
        assert one.record.settings.num_workers == 2
        kill_workers(one)
        assert drawn_from(loader) == plain()
        assert one.record.state == "left_alone"


def test_what_is_on_trial_is_not_in_force(tmp_path: Path) -> None:
    """A run may end at any moment: its record must not name settings that have proven nothing."""
    with tuning(tmp_path, [Knobs(2), Knobs(3)], [True, False]) as one:
        loader = one.trains(DataLoader(Squares(2 * SIZE), batch_size=2))
        stats = one.session.loaders.of(loader)
        noted = set()
        for _ in loader:
            noted.add((one.record.settings.num_workers, stats.record(True).num_workers, stats.serving_workers))
        assert one.record.state == "settled"
        assert all(proven == in_force for proven, in_force, _ in noted)
        assert noted == {(0, 0, 0), (0, 0, 2), (2, 2, 2), (2, 2, 3)}


@pytest.mark.parametrize("clearly", [True, False])
def test_what_clearly_pays_goes_on_and_other_trials_are_followed_by_what_is_in_force(
    tmp_path: Path, clearly: bool
) -> None:
    with tuning(tmp_path, [Knobs(2)], [True], clearly=clearly) as one:
        loader = one.trains(DataLoader(Squares(2 * SIZE), batch_size=2))
        served = [one.source.pool.knobs.num_workers for _ in loader]
        assert (one.record.state, [move.outcome for move in one.record.moves]) == ("settled", ["kept"])
    assert [workers for workers, _ in itertools.groupby(served)] == ([0, 2] if clearly else [0, 2, 0, 2])


def test_what_could_not_be_told_is_not_kept_and_may_be_tried_again(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2), Knobs(2)], [None, True]) as one:
        assert drawn_from(one.trains(DataLoader(Squares(2 * SIZE), batch_size=2))) == plain(2 * SIZE)
        first, second = one.record.moves
        assert (first.outcome, second.outcome) == ("returned", "kept")
        assert "the job itself became" in str(first.why)
        assert second.why is None
        assert one.record.settings.num_workers == 2


def test_a_trial_that_was_not_compared_is_on_trial(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)]) as one:
        for _ in one.trains(DataLoader(Squares(2 * SIZE), batch_size=2)):
            if (moves := one.record.moves) and moves[0].batches_per_s is not None:
                break
        assert (one.record.state, moves[0].outcome, one.record.settings.num_workers) == ("trying", "trying", 0)


def test_what_was_found_for_another_loader_stays(tmp_path: Path) -> None:
    with tuning(tmp_path, []) as one:
        one.live.write("train.py:1", Settings(num_workers=2))
        one.live.write("train.py:9", Settings(num_workers=3))
        one.live.write("train.py:1", None)
        assert json.loads((tmp_path / store.SETTINGS_FILE).read_text())["num_workers"] == 3
        one.live.write("train.py:9", None)
        assert not (tmp_path / store.SETTINGS_FILE).exists()


class Damaged(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 31:
            raise ValueError("record 31 is damaged")
        return super().__getitem__(index)


def test_an_error_of_the_data_set_is_the_one_of_the_training_process(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)], [True]) as one:
        drawn, errors = [], []
        iterator = iter(one.trains(DataLoader(Damaged(SIZE), batch_size=2)))
        while True:
            try:
                drawn.append(flat(next(iterator)))
            except StopIteration:
                break
            except ValueError as error:
                errors.append(str(error))
        assert errors == ["record 31 is damaged"]
        assert drawn == [batch for batch in plain() if 31 not in batch[1]]
        assert one.record.settings.num_workers == 2


def test_a_pass_that_an_error_ends_leaves_no_workers_to_the_garbage_collector(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)], [True]) as one:
        loader = one.trains(DataLoader(Damaged(SIZE), batch_size=2))
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(ValueError, match="record 31") as raised:
                drawn_from(loader)
            assert one.record.settings.num_workers == 2
            assert raised.value.__context__ is None
            del raised
            assert one.tuner._source() is None
        finally:
            gc.enable()


def test_an_evaluation_loader_is_not_touched(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)]) as one:
        assert drawn_from(DataLoader(Squares(SIZE), batch_size=2)) == plain()
        assert one.record.moves == ()


def test_two_loops_over_one_loader_have_their_own_batches(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)], [True]) as one:
        loader = one.trains(DataLoader(Squares(8), batch_size=2))
        pairs = [(flat(outer)[1], flat(inner)[1]) for outer in loader for inner in loader]
        indices = [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert pairs == [(outer, inner) for outer in indices for inner in indices]


def test_short_passes_with_a_loader_of_their_own_count_together(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(1)], limits=replace(HASTY, least_batches=9)) as one:
        for _ in range(16):  # of four batches each
            assert drawn_from(one.trains(DataLoader(Squares(16), batch_size=4))) is not None
        assert [move.outcome for move in one.record.moves] == ["kept"]


def test_passes_that_the_queue_holds_show_no_rate(tmp_path: Path) -> None:
    """Of 6 batches: one worker in place of two was said to be 2.5 times as fast, and the job took as long."""
    for batches, state in ((15, "left_alone"), (16, "settled")):
        with tuning(tmp_path / str(batches), [Knobs(1)], limits=replace(HASTY, shortest_pass=4)) as one:
            loader = one.trains(DataLoader(Squares(batches), num_workers=2))
            for _ in range(3):
                assert len(drawn_from(loader)) == batches
            assert one.record.state == state
            assert ("passes of 15 batches are too short" in one.record.why) == (state == "left_alone")


class Scaled(Squares):
    """Depends on something that a script may change: the epoch, a curriculum."""

    scale = 1.0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), self.scale * index), index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_changed_between_passes_is_seen_by_the_next(workers: int, tmp_path: Path) -> None:
    data = Scaled(SIZE)
    with tuning(tmp_path, [Knobs(2), Knobs(3)]) as one:
        loader = one.trains(DataLoader(data, batch_size=2, num_workers=workers))
        for data.scale in (1.0, 3.0, 4.0):
            assert [flat(batch)[0][1][0] for batch in loader] == [data.scale * index for index in range(1, SIZE, 2)]
        assert one.record.settings.num_workers == 3


def test_a_data_set_changed_during_a_pass_has_its_effect_at_once(tmp_path: Path) -> None:
    """As without workers: batches that they have made before are made again."""
    data, tuned = Scaled(SIZE), 0
    with tuning(tmp_path, [Knobs(2)]) as one:
        for count, (scaled, indices) in enumerate(one.trains(DataLoader(data, batch_size=2))):
            assert flat(scaled)[1][0] == data.scale * indices[1]
            tuned += one.source.pool.knobs.num_workers > 0
            data.scale = 3.0 if count > 12 else 1.0
        assert tuned
        assert one.record.why == ("the script changes its data set during a pass (scale), which workers would not see")
        assert one.record.settings.num_workers == 0


@pytest.mark.parametrize("persist", [False, True])
def test_workers_of_a_later_pool_have_the_data_set_of_the_first(persist: bool, tmp_path: Path) -> None:
    """What the script sets for the next pass, or never has an effect, must not come early with other workers."""

    def run(trains: Callable[[Any], Any]) -> list[Any]:
        data, drawn = Scaled(SIZE), []
        loader = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=persist)
        for epoch in range(2):
            for count, batch in enumerate(trains(loader)):
                drawn.append(flat(batch))
                if count == 12:
                    data.scale = 2.0 + epoch
        return drawn

    expected = run(lambda loader: loader)
    with tuning(tmp_path, [Knobs(2), Knobs(3), Knobs(2), Knobs(3), Knobs(2)]) as one:
        assert run(one.trains) == expected
        assert one.record.moves
        assert one.record.why == "the script changes its data set (scale), which only later workers would see"


def test_what_the_script_sets_in_its_collate_function_has_its_effect_at_once(tmp_path: Path) -> None:
    """A collate function that resizes, for one."""

    class Resizing:
        size = 1

        def __call__(self, samples: list[Any]) -> list[int]:
            return [self.size * index for _, index in samples]

    resize = Resizing()
    with tuning(tmp_path, [Knobs(2)]) as one:
        for count, batch in enumerate(one.trains(DataLoader(Squares(SIZE), batch_size=2, collate_fn=resize))):
            assert batch[1] == resize.size * (2 * count + 1)
            resize.size = 3 if count > 12 else 1
        assert [move.outcome for move in one.record.moves] == ["kept"]


@pytest.mark.parametrize("persist", [False, True])
def test_loaders_of_one_line_are_drawn_side_by_side(persist: bool, tmp_path: Path) -> None:
    """Continual learning: the second is made after a pass over the first."""
    loaders, drawn = [], []
    with tuning(tmp_path, []) as one:
        for _ in range(2):
            loader = DataLoader(Squares(SIZE), batch_size=2, num_workers=1, persistent_workers=persist)
            loaders.append(one.trains(loader))
            assert drawn_from(loader) == plain()
        drawn = [(flat(first), flat(second)) for first, second in zip(*loaders, strict=True)]
        assert drawn == list(zip(plain(), plain(), strict=True))
        assert [drawn_from(loader) for loader in loaders] == [plain(), plain()]


def test_a_data_set_goes_with_its_loader(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)]) as one:
        loader: Any = one.trains(DataLoader(Squares(SIZE), batch_size=2))
        data = weakref.ref(loader.dataset)
        assert drawn_from(loader) == plain()
        assert [move.outcome for move in one.record.moves] == ["kept"]
        del loader
        gc.collect()
        deadline_s = time.monotonic() + 20  # workers end on another thread
        while data() is not None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert data() is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_script_sees_an_iterator_of_torchs(workers: int, tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)]) as one:
        passing: Any = iter(one.trains(DataLoader(Squares(SIZE), batch_size=2, num_workers=workers)))
        next(passing)
        assert isinstance(passing, _BaseDataLoaderIter)
        assert isinstance(passing, _MultiProcessingDataLoaderIter) == bool(workers)
        assert len(passing._dataset) == SIZE
        assert not hasattr(passing, "no_such_name")
        passing._shutdown_workers()


def test_pools_leave_warnings_as_they_were(tmp_path: Path) -> None:
    """A change of the filters would show every warning again that Python shows once for a line."""
    noted: dict[Any, Any] = {}
    with tuning(tmp_path, [Knobs(3)]) as one, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in one.trains(DataLoader(Squares(SIZE), batch_size=2)):
            warnings.warn_explicit("once, please", UserWarning, "job.py", 1, registry=noted)
        assert [move.outcome for move in one.record.moves] == ["kept"]
    assert [str(each.message) for each in seen] == ["once, please"]


def test_workers_that_persist_keep_the_data_set_they_started_with(tmp_path: Path) -> None:
    """As in the plain run. A pool of later workers would have another one."""
    data = Scaled(SIZE)
    with tuning(tmp_path, [Knobs(2)]) as one:
        loader = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
        for data.scale in (1.0, 3.0):
            assert [flat(batch)[0][1][0] for batch in loader] == [1.0 * index for index in range(1, SIZE, 2)]
            one.trains(loader)
        assert one.record.why == "the script changes its data set (scale), which only later workers would see"


@pytest.mark.parametrize("shuts_down", [False, True])
def test_a_script_restarts_its_workers_by_letting_go_of_their_iterator(shuts_down: bool, tmp_path: Path) -> None:
    """mmdetection's way to tell workers that persist of another pipeline. It draws a base seed, as in the plain run."""

    def run(loader: Any, trains: Callable[[Any], Any]) -> tuple[list[float], float]:
        torch.manual_seed(3)
        firsts = []
        for epoch in range(4):
            if epoch == 2:
                loader.dataset.scale = 3.0
                if shuts_down:
                    loader._iterator._shutdown_workers()
                loader._DataLoader__initialized = False
                loader._iterator = None
                loader._DataLoader__initialized = True
            first, *_ = [flat(batch)[0][1][0] for batch in trains(loader)]
            firsts.append(first)
        return firsts, torch.rand(()).item()

    def persistent() -> Any:
        return DataLoader(Scaled(SIZE), batch_size=2, num_workers=1, persistent_workers=True)

    expected = run(persistent(), lambda loader: loader)
    assert expected[0] == [1.0, 1.0, 3.0, 3.0]
    with tuning(tmp_path, []) as one:
        assert run(persistent(), one.trains) == expected


def test_a_copy_of_a_loader_has_workers_of_its_own(tmp_path: Path) -> None:
    with tuning(tmp_path, []) as one:
        loader: Any = DataLoader(Squares(SIZE), batch_size=2, num_workers=1, persistent_workers=True)
        assert drawn_from(one.trains(loader)) == plain()
        assert isinstance(loader._iterator, _MultiProcessingDataLoaderIter)
        for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
            assert other._iterator is None
            assert drawn_from(other) == plain()
        assert drawn_from(loader) == plain()


# --------------------------------------------------------------------------- random numbers


class Drawing(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3), index


class DrawingElsewhere(Squares):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.own = np.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(self.own.random())), index


class DrawingByWorkerSeed(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        seed = info.seed if (info := get_worker_info()) is not None else 0
        return torch.rand(3, generator=torch.Generator().manual_seed(seed + index)), index


@pytest.mark.parametrize(
    ("kind", "workers"), [(Drawing, 0), (Drawing, 1), (DrawingElsewhere, 1), (DrawingByWorkerSeed, 1)]
)
@pytest.mark.parametrize("exact", [False, True])
def test_random_augmentation_is_tuned_and_told_unless_exact(
    kind: type[Squares], exact: bool, workers: int, tmp_path: Path
) -> None:
    with tuning(tmp_path, [Knobs(2)], exact=exact) as one:
        loader = one.trains(DataLoader(kind(SIZE), batch_size=2, num_workers=workers))
        assert [label for _, labels in loader for label in labels.tolist()] == list(range(SIZE))
        if exact:
            assert (one.record.state, one.record.moves, one.record.note) == ("left_alone", (), None)
            assert "draws random numbers" in one.record.why
        else:
            assert one.record.settings.num_workers == 2
            assert "numbers of the same distribution" in str(one.record.note)


class SeededForEachSample(Squares):
    own = torch.Generator()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3, generator=self.own.manual_seed(index)), index


class ChangingUnseen(Squares):
    """A state that nobody sees from outside: samples in a cache are changed in place."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return _cached(index).mul_(0.5), index


@functools.cache
def _cached(index: int) -> torch.Tensor:
    return torch.full((3,), float(index))


UNIQUE = "a random generator of its own, of which each worker would have the same copy"
UNSEEN = "no random generator that is known"


@pytest.mark.parametrize(
    ("kind", "why"), [(DrawingElsewhere, UNIQUE), (DrawingByWorkerSeed, UNSEEN), (ChangingUnseen, UNSEEN)]
)
def test_what_workers_would_repeat_stays_in_the_training_process(kind: Any, why: str, tmp_path: Path) -> None:
    """Forked workers have the same copy of such a state, in every pass again."""
    _cached.cache_clear()
    expected = [drawn_from(loader) for loader in [DataLoader(kind(SIZE), batch_size=2)] for _ in range(2)]
    _cached.cache_clear()
    with tuning(tmp_path, [Knobs(2)]) as one:
        loader = one.trains(DataLoader(kind(SIZE), batch_size=2))
        assert [drawn_from(loader) for _ in range(2)] == expected
        assert one.record.state == "left_alone"
        assert why in one.record.why


def test_a_generator_that_is_seeded_for_each_sample_is_no_reason(tmp_path: Path) -> None:
    expected = drawn_from(DataLoader(SeededForEachSample(SIZE), batch_size=2))
    with tuning(tmp_path, [Knobs(2)]) as one:
        assert drawn_from(one.trains(DataLoader(SeededForEachSample(SIZE), batch_size=2))) == expected
        assert one.record.settings.num_workers == 2


def test_the_shuffle_that_begins_a_pass_is_no_random_draw_of_the_data_set(tmp_path: Path) -> None:
    limits = replace(HASTY, least_batches=3)  # the check begins with a pass
    with tuning(tmp_path, [Knobs(2)], limits=limits, exact=True) as one:
        loader = one.trains(DataLoader(Squares(8), batch_size=2, shuffle=True))
        for _ in range(10):
            assert len(drawn_from(loader)) == 4
        assert (one.record.note, [move.outcome for move in one.record.moves]) == (None, ["kept"])


def test_exact_tunes_what_stays_bit_for_bit(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)], exact=True) as one:
        assert drawn_from(one.trains(DataLoader(Squares(SIZE), batch_size=2))) == plain()
        assert one.record.settings.num_workers == 2


class Printing(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        os.write(1, b"x")
        os.write(2, b"x")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_data_set_prints_is_printed_once(
    workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As of a picture that it leaves out. Three batches are made again, to compare them."""
    with tuning(tmp_path, [Knobs(2)]) as one:
        drawn_from(one.trains(DataLoader(Printing(SIZE), batch_size=2, num_workers=workers)))
        assert [move.outcome for move in one.record.moves] == ["kept"]
    captured = capfd.readouterr()
    assert (captured.out.count("x"), captured.err.count("x")) == (SIZE, SIZE)


# --------------------------------------------------------------------------- what only a few samples do

RARE = 28  # long after the check, and while workers serve


class NotesRarely(Squares):
    def __init__(self) -> None:
        super().__init__(SIZE)
        self.bad: dict[str, list[int]] = {"samples": []}

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index >= RARE:
            self.bad["samples"].append(index)
        return super().__getitem__(index)


class DrawsRarely(Squares):
    """From one of the global generators, or from its own."""

    def __init__(self, which: str) -> None:
        super().__init__(SIZE)
        own = np.random.default_rng(0)
        cached = np.random.RandomState(0)
        cached.randn()  # makes two numbers, of which the next draw gives the other
        draws = {"torch": lambda: torch.rand(()), "random": random.random, "numpy": np.random.rand, "own": own.random}
        self.draw: Any = {**draws, "cached": cached.randn}[which]
        self.rare = SIZE - 1 if which == "cached" else RARE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(self.draw()) if index >= self.rare else 1.0), index


def seeded() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


@pytest.mark.parametrize("exact", [False, True])
def test_what_a_data_set_notes_of_few_samples_is_not_lost_in_workers(exact: bool, tmp_path: Path) -> None:
    data, served = NotesRarely(), []
    with tuning(tmp_path, [Knobs(2)], exact=exact) as one:
        drawn = []
        for batch in one.trains(DataLoader(data, batch_size=2)):
            drawn.append(flat(batch))
            served.append(one.source.pool.knobs.num_workers)
        assert drawn == plain()
        assert data.bad == {"samples": list(range(RARE, SIZE))}
        assert one.record.state == "left_alone"
        assert "changes while it makes a batch (bad)" in one.record.why
        assert one.record.settings.num_workers == 0
    assert 2 in served
    assert served[RARE // 2 :] == [0] * ((SIZE - RARE) // 2)


@pytest.mark.parametrize(
    ("which", "exact"),
    [*((each, True) for each in ("torch", "random", "numpy", "own", "cached")), ("own", False), ("cached", False)],
)
def test_the_draws_that_few_samples_need_are_kept(which: str, exact: bool, tmp_path: Path) -> None:
    seeded()
    expected = drawn_from(DataLoader(DrawsRarely(which), batch_size=2))
    after = (torch.rand(1).item(), random.random(), np.random.rand())
    seeded()
    with tuning(tmp_path, [Knobs(2)], exact=exact) as one:
        assert drawn_from(one.trains(DataLoader(DrawsRarely(which), batch_size=2))) == expected
        assert (torch.rand(1).item(), random.random(), np.random.rand()) == after
        assert one.record.state == "left_alone"
        assert ("draws random numbers" if exact else UNIQUE) in one.record.why
        assert [move.outcome for move in one.record.moves] == ["kept"]


# --------------------------------------------------------------------------- what is left alone


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


class Sharing(Squares):
    """What a batch made again counts is counted twice."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.seen: Any = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with self.seen.get_lock():
            self.seen.value += 1
        return super().__getitem__(index)


class Unpicklable(Squares):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.zeros(2), "f": lambda: index}


class OtherwiseInWorkers(Squares):
    """Comes out different by the last bit of one number in a worker."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels, label = super().__getitem__(index)
        return pixels.nextafter(torch.tensor(-1.0)) if get_worker_info() is not None else pixels, label


class Reacting(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(SIZE)

    def __len__(self) -> int:
        return SIZE


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


class OwnWay(DataLoader[Any]):
    """As fastai's, timm's and StatefulDataLoader."""

    def __iter__(self) -> Any:
        return itertools.chain(super().__iter__())


LEFT_ALONE = {
    "changes as it is read": lambda path: DataLoader(Counting(SIZE), batch_size=2),
    "BufferedReader": lambda path: DataLoader(HoldingAFile(SIZE, path / "data"), batch_size=2),
    "shares a Synchronized with other processes": lambda path: DataLoader(Sharing(SIZE), batch_size=2, num_workers=1),
    "cannot send its batches": lambda path: DataLoader(Unpicklable(SIZE), batch_size=None),
    "come out different in a worker": lambda path: DataLoader(OtherwiseInWorkers(SIZE), batch_size=2),
    "sampler Reacting": lambda path: DataLoader(Squares(SIZE), batch_size=2, sampler=Reacting()),
    "sampler is a list": lambda path: DataLoader(Squares(SIZE), batch_size=2, sampler=list(range(SIZE))),
    "an IterableDataset": lambda path: DataLoader(Stream(), batch_size=2),
    "IterableDataset decides": lambda path: DataLoader(Stream(), batch_size=2, num_workers=1),
    "its class OwnWay": lambda path: OwnWay(Squares(SIZE), batch_size=2),
    "no fixed order": lambda path: DataLoader(Squares(SIZE), batch_size=2, num_workers=2, in_order=False),
}


@pytest.mark.parametrize("reason", sorted(LEFT_ALONE))
def test_what_could_change_what_is_trained_is_left_alone_with_its_reason(reason: str, tmp_path: Path) -> None:
    make = LEFT_ALONE[reason]
    torch.manual_seed(3)
    random.seed(3)
    expected = drawn_from(make(tmp_path))
    torch.manual_seed(3)
    random.seed(3)
    with tuning(store.create_folder(tmp_path / "run"), [Knobs(2)]) as one:
        drawn = drawn_from(one.trains(make(tmp_path)))
        if reason not in ("cannot send its batches", "no fixed order"):
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
        assert drawn_from(loader) == plain()
        assert len(one.record.moves) == 1


def test_what_the_script_reorders_during_a_pass_comes_in_that_order(tmp_path: Path) -> None:
    def drawn(order: list[list[int]], loader: Any) -> list[Any]:
        batches = []
        for index, batch in enumerate(loader):
            batches.append(flat(batch))
            if index % 8 == 0:
                order[index + 1 :] = order[index + 1 :][::-1]
        return batches

    orders = [[[index, index + 1] for index in range(0, SIZE, 2)] for _ in range(2)]
    expected = drawn(orders[0], DataLoader(Squares(SIZE), batch_sampler=orders[0]))
    with tuning(tmp_path, [Knobs(2)]) as one:
        assert drawn(orders[1], one.trains(DataLoader(Squares(SIZE), batch_sampler=orders[1]))) == expected


# --------------------------------------------------------------------------- time


def test_each_batch_bears_its_part_of_starting_the_workers(tmp_path: Path) -> None:
    """Workers that end with a pass of a few batches cost more than they win."""
    with tuning(tmp_path, [Knobs(2)]) as one:
        loader = one.trains(DataLoader(Squares(16), batch_size=2))
        passing = iter(loader)
        for _ in passing:
            if one.tuner.phase is Phase.TRYING and one.source.pool.is_serving:
                one.source.pool.start_s = 2.0
                break
        seen = one.tuner._with_pass_start(one.source, Measurement(Knobs(2), 10.0, 0.0, 0.5, 0.05))
        assert seen.batches_per_s == pytest.approx(1 / (0.1 + 2.2 / 8))
        assert seen.wait_share == pytest.approx(1 - seen.batches_per_s * 0.05)


def test_an_error_of_tuning_ends_tuning_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tuning(tmp_path, [Knobs(2)]) as one:
        monkeypatch.delenv("FULLTILT_DEBUG")
        monkeypatch.setattr("fulltilt.tuning.live.tuner.BatchCheck.fetched", lambda *_: 1 / 0)
        assert drawn_from(one.trains(DataLoader(Squares(SIZE), batch_size=2))) == plain()
        assert one.record.state == "settled"
        assert "ZeroDivisionError" in one.record.why
