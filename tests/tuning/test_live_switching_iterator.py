"""Whatever live tuning does to a loader's workers, the script draws the same batches and the same random numbers."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fulltilt.tuning.live.measurement import Knobs
from tests.tuning.live_jobs import Squares, flat, generators_now, tuning

SIZE = 60


class Dicts(Squares):
    """Samples are dicts, and one of them cannot be read."""

    damaged = 5

    def __getitem__(self, index: int) -> Any:
        if index == self.damaged:
            raise ValueError(f"sample {index} is damaged")
        pixels, label = super().__getitem__(index)
        return {"pixels": pixels, "label": label}


class Drawing(Squares):
    """Random augmentation."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2), random.random(), index


SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "in order": lambda data: {},
    "shuffled": lambda data: {"shuffle": True},
    "own generator": lambda data: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "replacement": lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=len(data) + 3)},
    "subset": lambda data: {"sampler": SubsetRandomSampler(range(0, len(data), 2))},
    "weighted": lambda data: {"sampler": WeightedRandomSampler(torch.arange(1.0, len(data) + 1), len(data))},
    "listed batches": lambda data: {"batch_sampler": [[i, (i * 7) % len(data)] for i in range(len(data))]},
    "batch sampler": lambda data: {"batch_sampler": BatchSampler(SequentialSampler(data), 3, False)},
    "no batches": lambda data: {"batch_size": None, "shuffle": True},
}
DATA = {"squares": Squares, "dicts": Dicts, "drawing": Drawing}


def make(job: dict[str, Any]) -> Any:
    data = DATA[job["data"]](job["size"])
    arguments = SAMPLERS[job["sampler"]](data)
    if "batch_sampler" not in arguments and "batch_size" not in arguments:
        arguments |= {"batch_size": job["batch"], "drop_last": job["drop_last"]}
    persistent = job["persistent"] and job["workers"] > 0
    return DataLoader(data, num_workers=job["workers"], persistent_workers=persistent, **arguments)


def story_of(passing: Iterator[Any], most: int | None) -> Iterator[Any]:
    """Every batch of a pass; an error in its place. None: to the end of the pass."""
    number = 0
    while number != most:
        try:
            yield flat(next(passing))
        except StopIteration:
            return
        except ValueError as error:
            # Its frames hold torch's iterator in a cycle, whose workers take five seconds to end when gc comes to it.
            yield "sample 5 is damaged" in str(error.with_traceback(None))
        torch.rand(1), random.random()  # training draws too (dropout)
        number += 1


def draw(job: dict[str, Any], passes: list[int | None], adopt: Any = lambda loader: loader) -> tuple[Any, ...]:
    """What the script has of all passes, with the generators' states between them."""
    torch.manual_seed(job["seed"])
    random.seed(job["seed"])
    loader = adopt(make(job))
    story: list[Any] = []
    for most in passes:
        story += story_of(iter(loader), most)
        own = loader.generator.get_state().tolist() if loader.generator is not None else None
        story.append((generators_now(), own))
    return tuple(story)


jobs = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "size": st.integers(2, 60),
        "batch": st.integers(1, 7),
        "drop_last": st.booleans(),
        "data": st.sampled_from(["squares", "dicts"]),
        "sampler": st.sampled_from(sorted(SAMPLERS)),
        "workers": st.sampled_from([0, 0, 1, 2]),
        "persistent": st.booleans(),
    }
)
knobs = st.builds(Knobs, st.integers(0, 3), st.integers(1, 3))
TINY = {
    "seed": 0,
    "size": 2,
    "batch": 1,
    "drop_last": False,
    "data": "squares",
    "sampler": "own generator",
    "workers": 1,
    "persistent": False,
}
LONG = {**TINY, "seed": 1, "size": 50, "batch": 2, "sampler": "shuffled", "workers": 0}
PERSISTENT = {**LONG, "workers": 2, "persistent": True}


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    job=jobs,
    script=st.lists(knobs, min_size=1, max_size=4),
    keeps=st.lists(st.booleans(), max_size=4),
    passes=st.lists(st.none() | st.integers(1, 6), min_size=1, max_size=3),
)
@example(job=LONG, script=[Knobs(2), Knobs(1, 3), Knobs(3)], keeps=[True, False, True], passes=[None, None])
@example(job=LONG, script=[Knobs(2), Knobs(2, 3)], keeps=[True, False], passes=[14, 14, None])
@example(job={**LONG, "data": "dicts"}, script=[Knobs(2), Knobs(1)], keeps=[True], passes=[None, 9, None])
@example(job={**PERSISTENT, "data": "dicts"}, script=[Knobs(1)] * 2, keeps=[False], passes=[3, None, 7, None])
@example(job=PERSISTENT, script=[Knobs(1), Knobs(3), Knobs(0)], keeps=[True], passes=[None, None])
@example(job={**LONG, "workers": 2}, script=[Knobs(1), Knobs(0), Knobs(3)], keeps=[False, True], passes=[7, None, None])
@example(job=TINY, script=[Knobs(0)], keeps=[], passes=[None, None])
@example(job={**TINY, "workers": 0, "size": 7, "batch": 2}, script=[Knobs(3)], keeps=[], passes=[None, None])
@example(job={**LONG, "sampler": "own generator"}, script=[Knobs(2, 9)], keeps=[], passes=[None, 24, None])
def test_the_batches_are_those_of_the_plain_run_bit_for_bit(
    job: dict[str, Any], script: list[Knobs], keeps: list[bool], passes: list[int | None]
) -> None:
    # A loader may have read to the end of a pass that the script leaves early.
    has_read_on = job["workers"] > 0 or job["size"] % job["batch"] > 0
    assume(job["sampler"] != "own generator" or not any(passes) or not has_read_on)
    plain = draw(job, passes)
    with tempfile.TemporaryDirectory() as folder, tuning(Path(folder), script, keeps) as one:
        assert draw(job, passes, one.trains) == plain
        record = one.record
        assert record.state != "left_alone", record.why
        if (job["size"], job["batch"]) == (LONG["size"], LONG["batch"]) and None in passes:  # long enough for a trial
            assert [move.outcome for move in record.moves if move.outcome != "trying"], record
            assert record.note is None, record.note


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(job=jobs, passes=st.lists(st.none() | st.integers(1, 6), min_size=1, max_size=3))
@example(job={**LONG, "workers": 2}, passes=[None, 3, None])
@example(job=PERSISTENT, passes=[None, 3, None])
def test_random_augmentation_is_that_of_the_plain_run_until_a_trial(
    job: dict[str, Any], passes: list[int | None]
) -> None:
    """Also where tuned workers begin a pass, they have the seeds that the plain run draws."""
    job = {**job, "data": "drawing"}
    plain = draw(job, passes)
    with tempfile.TemporaryDirectory() as folder, tuning(Path(folder), []) as one:
        assert draw(job, passes, one.trains) == plain


@pytest.mark.parametrize("persistent", [True, False])
def test_two_loaders_in_turns_have_their_own_batches(persistent: bool, tmp_path: Path) -> None:
    pair = [{**LONG, "workers": 1, "persistent": persistent}, {**LONG, "sampler": "in order"}]

    def story(adopt: Any = lambda loader: loader) -> list[Any]:
        torch.manual_seed(3)
        loaders = [adopt(make(job)) for job in pair]
        return [[flat(a), flat(b)] for _ in range(2) for a, b in zip(*loaders, strict=True)]

    plain = story()
    with tuning(tmp_path, [Knobs(2)] * 2) as one:
        assert story(one.trains) == plain
        outcomes = [move.outcome for tuner in one.live.tuners.values() for move in tuner.record.moves]
        assert outcomes == ["kept", "kept"]


def overlapping(loader: Any) -> tuple[Any, ...]:
    """What two iterators give in turns, a third after the end of its pass, and what the generator gives then."""
    torch.manual_seed(3)
    over = iter(loader)
    list(over)
    first = iter(loader)
    drawn = [next(first), next(first)]
    second = iter(loader)
    drawn += [next(second), next(first), next(second)]
    return flat(drawn), flat(next(over, None)), flat(list(second)), flat(list(first)), torch.rand(1).item()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_pass_begun_while_another_goes_on_is_torchs_own(persistent: bool, tmp_path: Path) -> None:
    """torch has one iterator for all passes of workers that persist, and one for each of others."""
    job = {**LONG, "workers": 1, "persistent": persistent}
    plain_loader = make(job)
    list(plain_loader)
    plain = overlapping(plain_loader)
    with tuning(tmp_path, [Knobs(2)]) as one:
        loader = one.trains(make(job))
        list(loader)
        assert one.record.settings.num_workers == 2
        assert overlapping(loader) == plain


class Uneven(Squares):
    """Every third sample takes long: of several workers the others would be done first."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.03 if index % 3 == 0 else 0.001)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_order_is_kept_where_the_scripts_own_loader_keeps_it(tmp_path: Path, workers: int) -> None:
    """With at most one worker batches come in the sampler's order, also with in_order=False."""
    loader = DataLoader(Uneven(60), batch_size=None, num_workers=workers, in_order=False)
    with tuning(tmp_path, [Knobs(3)]) as one:
        assert [index for _, index in one.trains(loader)] == list(range(60))
        assert [move.outcome for move in one.record.moves] == ["kept"]


class Timed(Squares):
    """Each sample says from when to when it was made, and by which process."""

    def __getitem__(self, index: int) -> Any:
        began_s = time.monotonic()
        time.sleep(0.03)
        made = torch.tensor([began_s, time.monotonic()], dtype=torch.float64)
        return made, multiprocessing.current_process().pid, index


def test_the_next_pool_begins_when_the_one_before_has_no_more_work_waiting(tmp_path: Path) -> None:
    """Two pools with full queues at work at once would make late batches at the cost of the next ones."""
    with tuning(tmp_path, [Knobs(2, 4)]) as one, pytest.MonkeyPatch.context() as patch:
        patch.setattr("fulltilt.tuning.live.tuner.BatchCheck.RANDOM", "same")
        loader = one.trains(DataLoader(Timed(SIZE), batch_size=None, num_workers=3, prefetch_factor=4))
        made = [(flat(times), pid, index) for times, pid, index in loader]
        assert [index for *_, index in made] == list(range(SIZE))
        (move,) = one.record.moves
        assert move.outcome == "kept"
        workers = list(dict.fromkeys(pid for _, pid, _ in made))
        assert len(workers) == 10  # those on trial, those before once more, and those that were kept
        old, new = ([times for times, pid, _ in made if pid in pids] for pids in (workers[:3], workers[3:5]))
        begins_s = min(began for began, _ in new)
        assert sum(began > begins_s for began, _ in old) <= 3


@pytest.mark.slow
def test_an_error_of_the_sampler_reaches_the_script(tmp_path: Path) -> None:
    class Breaks(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(20)
            raise LookupError("no more")

    with tuning(tmp_path, []) as one:
        with pytest.raises(LookupError, match="no more"):
            list(one.trains(DataLoader(Squares(SIZE), sampler=Breaks(), num_workers=1)))
        assert one.tuner._source() is None, "its workers have ended, without a garbage collection"


def test_workers_end_though_a_traceback_holds_what_they_made_batches_for(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(2)]) as one:
        workers = held = None
        for _ in one.trains(DataLoader(Squares(SIZE), batch_size=2)):
            pool = one.source.pool
            if workers is None and pool.knobs.num_workers and pool.is_serving:
                held, workers = pool.iterator, pool.iterator._workers
        assert held is not None
        # Not worker.join: of two threads that wait for a process, one may see it alive when the other has reaped it.
        for thread in threading.enumerate():
            if thread.name == "fulltilt-retire":
                thread.join(30)
        assert not any(worker.is_alive() for worker in workers)


def test_the_batches_of_a_pass_are_counted_over_all_pools(tmp_path: Path) -> None:
    """Loaders that can be resumed read torch's own count."""
    with tuning(tmp_path, [Knobs(2), Knobs(1)]) as one:
        passing: Any = iter(one.trains(DataLoader(Squares(SIZE), batch_size=2)))
        counts = [passing._num_yielded for _ in passing]
        assert counts == list(range(1, SIZE // 2 + 1))
        assert [move.outcome for move in one.record.moves] == ["kept", "kept"]
        assert len(passing) == SIZE // 2


def test_workers_end_with_their_pass_and_with_their_loader(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    with tuning(tmp_path, [Knobs(2), Knobs(1)]) as one:
        for persistent in (False, True):
            loader = DataLoader(Squares(SIZE), num_workers=1, persistent_workers=persistent)
            list(one.trains(loader))
            passing = iter(loader)
            next(passing)
            del loader, passing
            deadline_s = time.monotonic() + 30
            while set(multiprocessing.active_children()) - before:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)


@pytest.mark.slow  # five workers import torch
def test_spawned_workers_give_way_to_spawned_workers_with_the_same_batches(tmp_path: Path) -> None:
    def loader(context: str) -> Any:
        torch.manual_seed(3)
        return DataLoader(Squares(40), batch_size=2, shuffle=True, num_workers=1, multiprocessing_context=context)

    plain = flat(list(loader("fork")))
    with tuning(tmp_path, [Knobs(2)]) as one:
        assert flat(list(one.trains(loader("spawn")))) == plain
        assert [move.outcome for move in one.record.moves] == ["kept"]
        assert one.record.settings.num_workers == 2
