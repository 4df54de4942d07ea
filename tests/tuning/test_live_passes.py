"""Passes that meet an error, are left early or asked on after their end: the script finds what the plain run has."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fulltilt.tuning.live.relay import Relay
from fulltilt.tuning.live.window import Knobs
from tests.tuning.live_jobs import HASTY, Squares, Tuning, flat, tuning

SIZE = 60


class Damaged(Squares):
    """Some of its samples cannot be read."""

    def __init__(self, size: int, *damaged: int) -> None:
        super().__init__(size)
        self.damaged = damaged

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.damaged:
            raise ValueError(f"sample {index} is damaged")
        return super().__getitem__(index)


class Slow(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.02)
        return super().__getitem__(index)


def until(happens: Callable[[], Any], passing: Callable[[], None] = lambda: time.sleep(0.01)) -> None:
    """Wait for something, or make passes until it happens."""
    deadline_s = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline_s
        passing()


def indices(drawn: Iterator[Any]) -> list[int]:
    """The sample of each batch, None for one that cannot be read."""
    found: list[Any] = []
    while True:
        try:
            found.append(flat(next(drawn))[1])
        except StopIteration:
            return found
        except ValueError:
            found.append(None)
        time.sleep(0.002)


def relay_of(one: Tuning) -> Relay:
    (tuner,) = one.live.tuners.values()
    relay = tuner._relay()
    assert relay is not None
    return relay


def state_after_an_error(adopt: Callable[[Any], Any]) -> list[int]:
    generator = torch.Generator().manual_seed(7)
    data = Damaged(5, *range(5))
    with pytest.raises(ValueError, match="damaged"):
        next(iter(adopt(DataLoader(data, batch_size=2, shuffle=True, generator=generator, num_workers=1))))
    return generator.get_state().tolist()


def test_a_pass_left_at_an_error_leaves_the_generator_as_the_plain_run_does(tmp_path: Path) -> None:
    """Workers are sent the next order before the error is raised, and here it is the sampler's last."""
    plain = state_after_an_error(lambda loader: loader)
    with tuning(tmp_path, []) as one:
        assert state_after_an_error(one.trains) == plain


def test_an_error_of_the_first_batch_does_not_open_a_pool_again_that_runs_dry(tmp_path: Path) -> None:
    """It took orders behind those of the pool that goes on after it."""
    with tuning(tmp_path, [Knobs(2)]) as one:
        data = Damaged(3, 0)
        loader = one.trains(DataLoader(data, batch_size=None))
        until(lambda: one.live.tuners and one.record.moves, lambda: [*indices(iter(loader))] and None)
        (tuner,) = one.live.tuners.values()
        until(lambda: all(pool.is_warm() for pool in tuner.pools()))
        data.size = 20
        tuner._workshop._forked_from = tuner._workshop._anatomy()  # it may be longer, for all that workers know
        assert indices(iter(loader)) == [None, *range(1, 20)]
        assert [move.outcome for move in one.record.moves] == ["kept"]


def test_an_iterator_that_is_over_takes_nothing_from_the_next_pass(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2, persistent=True)]) as one:
        loader = one.trains(DataLoader(Squares(SIZE), batch_size=None))
        over = iter(loader)

        def another_pass() -> None:
            nonlocal over
            over = iter(loader)
            assert indices(over) == list(range(SIZE))

        until(lambda: one.live.tuners and one.record.settings.num_workers == 2, another_pass)
        another_pass()
        drawn = []
        for batch in loader:
            drawn.append(flat(batch)[1])
            assert next(over, None) is None
        assert drawn == list(range(SIZE))


def test_workers_of_the_script_that_a_hand_over_left_behind_are_ended(tmp_path: Path) -> None:
    """The script leaves the pass while its own workers, which persist, still make their last batches."""
    with tuning(tmp_path, [Knobs(1, persistent=True)]) as one:
        loader = one.trains(
            DataLoader(Slow(20 * SIZE), batch_size=None, num_workers=2, prefetch_factor=4, persistent_workers=True)
        )
        assert any(not relay_of(one).is_steady for _ in loader), one.record
        assert indices(itertools.islice(loader, SIZE)) == list(range(SIZE))
        assert one.record.settings.num_workers == 1
        until(lambda: len(multiprocessing.active_children()) == 1)


def test_a_pool_that_dies_after_it_was_taken_back_says_nothing_of_the_next_trial(tmp_path: Path) -> None:
    limits = dataclasses.replace(HASTY, least_batches=3)
    with tuning(tmp_path, [Knobs(2, 6), Knobs(1, 3)], [False, True], limits) as one:
        loader = one.trains(DataLoader(Slow(3 * SIZE), batch_size=None, num_workers=1))
        drawn, killed = [], False
        for batch in loader:
            drawn.append(flat(batch)[1])
            pool = relay_of(one).serving
            if pool.knobs == Knobs(2, 6) and not relay_of(one).is_steady and not killed:
                killed = True
                for worker in pool.iterator._workers:
                    worker.kill()
        assert killed
        assert drawn == list(range(3 * SIZE))
        assert [move.outcome for move in one.record.moves] == ["returned", "kept"]


def test_orders_of_the_scripts_own_workers_are_forgotten_with_their_batches(tmp_path: Path) -> None:
    """A pass of a million batches would have kept the indices of all of them."""
    with tuning(tmp_path, []) as one:
        loader = one.trains(DataLoader(Squares(SIZE), batch_size=None, num_workers=2))
        owed = [len(relay_of(one).serving.unfulfilled()) for _ in loader]
        assert len(owed) == SIZE
        assert max(owed) <= 5


class Hanging(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(6 if index == SIZE - 1 else 0)
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_batch_that_takes_longer_than_the_scripts_timeout_is_the_error_that_torch_makes_of_it(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(1)]) as one:
        loader = one.trains(DataLoader(Hanging(SIZE), batch_size=None, num_workers=2, timeout=1))
        passing = iter(loader)
        for _ in range(SIZE - 1):
            next(passing)
            time.sleep(0.02)
        assert one.record.settings.num_workers == 1
        with pytest.raises(RuntimeError):
            next(passing)


class Slowest(Squares):
    """Its samples take longer than a pool is waited for by itself."""

    epoch = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.5)
        return torch.full((3,), float(self.epoch)), index


@pytest.mark.slow
def test_batches_that_take_long_are_waited_for_in_every_pass(tmp_path: Path) -> None:
    """Workers that are started anew for a pass, since the data set has changed, were given less time than the first."""
    limits = dataclasses.replace(HASTY, first_batch_s=0.2)
    with tuning(tmp_path, [Knobs(2)], limits=limits) as one:
        data = Slowest(8)
        loader = one.trains(DataLoader(data, batch_size=None))
        for data.epoch in range(4):
            assert [(flat(pixels), index) for pixels, index in loader] == [([data.epoch] * 3, i) for i in range(8)]
        assert (one.record.state, one.record.settings.num_workers) == ("settled", 2), one.record.why


def test_a_pool_that_goes_back_to_the_queue_of_before_may_take_as_long_as_the_script_allows(tmp_path: Path) -> None:
    limits = dataclasses.replace(HASTY, least_batches=12)  # a trial outlives the script's own pool
    with tuning(tmp_path, [Knobs(2, 4)], [False], limits) as one:
        loader = one.trains(DataLoader(Squares(8), batch_size=None, num_workers=2))
        until(lambda: one.live.tuners and one.record.state == "settled", lambda: [*indices(iter(loader))] and None)
        (tuner,) = one.live.tuners.values()
        (pool,) = tuner.pools()
        assert pool.knobs[:2] == (2, 2)
        assert pool.iterator.patience_s is None


def overlapping(loader: Any) -> tuple[Any, ...]:
    """What two iterators give in turns, a third after the end of its pass, and what the generator gives then."""
    torch.manual_seed(3)
    over = iter(loader)
    indices(over)
    first = iter(loader)
    drawn = [next(first), next(first)]
    second = iter(loader)
    drawn += [next(second), next(first), next(second), next(over)]
    return [index for _, index in drawn], indices(second), indices(first), torch.rand(1).item()


def test_a_pass_begun_while_another_goes_on_draws_what_workers_that_persist_draw(tmp_path: Path) -> None:
    """torch has one iterator for all of them, and seeds it once. An error's traceback may hold on to one left early."""
    arguments: Any = {"batch_size": None, "shuffle": True, "num_workers": 1, "persistent_workers": True}
    plain_loader = DataLoader(Squares(SIZE), **arguments)
    indices(iter(plain_loader))
    plain = overlapping(plain_loader)
    with tuning(tmp_path, [Knobs(2)]) as one:
        loader = one.trains(DataLoader(Squares(SIZE), **arguments))
        indices(iter(loader))
        until(lambda: one.record.settings.num_workers == 2, lambda: [*indices(iter(loader))] and None)
        assert overlapping(loader) == plain


def test_a_loader_left_alone_has_workers_of_ours_as_it_would_have_its_own(tmp_path: Path) -> None:
    """Its own, which persist, are gone: an error is the script's, and a batch may take as long as it does."""
    with tuning(tmp_path, [Knobs(2)]) as one:
        loader = one.trains(DataLoader(Squares(SIZE), batch_size=None, num_workers=1, persistent_workers=True))
        indices(iter(loader))
        until(lambda: one.record.settings.num_workers == 2, lambda: [*indices(iter(loader))] and None)
        passing = iter(loader)
        next(passing)
        for worker in relay_of(one).serving.iterator._workers:
            worker.kill()
        assert indices(passing) == list(range(1, SIZE))
        for _ in range(3):
            passing = iter(loader)
            pool = relay_of(one).serving
            assert (pool.final, pool.knobs.workers, pool.iterator.patience_s) == (True, 1, None)
            assert indices(passing) == list(range(SIZE))
        assert one.record.state == "left_alone"


class Scaled(Squares):
    scale = 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.01)
        return torch.tensor(index), self.scale * index


@pytest.mark.slow
def test_a_data_set_changed_while_workers_taken_back_run_dry_is_seen_by_the_next_batch(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2, 8)], [False]) as one:
        data = Scaled(20 * SIZE)
        wanted = []
        for index, sample in one.trains(DataLoader(data, batch_size=None)):
            wanted.append(data.scale * int(index))
            assert sample == wanted[-1]
            relay = relay_of(one)
            if data.scale == 1 and relay.serving.knobs.workers and relay.pools[-1].knobs.workers == 0:
                data.scale = 2
        assert data.scale == 2, one.record
        assert len(wanted) == 20 * SIZE


def test_a_pass_shorter_than_the_queue_draws_from_the_scripts_generator_as_the_plain_run_does(tmp_path: Path) -> None:
    """Its sampler draws when it begins and when it ends: both before the script has its first batch."""

    def story(loader: Any) -> list[Any]:
        loader.generator.manual_seed(9)
        return [(flat(batch), torch.rand(1, generator=loader.generator).item()) for _ in range(3) for batch in loader]

    def loader() -> Any:
        return DataLoader(Slow(20), batch_size=2, shuffle=True, generator=torch.Generator())

    with tuning(tmp_path, [Knobs(2, 8)]) as one:
        tuned = one.trains(loader())
        until(lambda: one.live.tuners and one.record.settings.num_workers == 2, lambda: [*tuned] and None)
        assert story(tuned) == story(loader())
