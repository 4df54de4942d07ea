"""Whatever live tuning does to a loader's workers, the script draws the same batches and the same random numbers."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fulltilt.tuning.live.window import Knobs
from tests.tuning.live_jobs import Squares, flat, generators_now, tuning

SAMPLERS = {
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


def draw(job: dict[str, Any], passes: list[int | None], adopt: Any = lambda loader: loader) -> tuple[Any, ...]:
    """Every batch of every pass, with the generators' states between them. A pass of None runs to its end."""
    torch.manual_seed(job["seed"])
    random.seed(job["seed"])
    data = Squares(job["size"])
    arguments = SAMPLERS[job["sampler"]](data)
    if "batch_sampler" not in arguments and "batch_size" not in arguments:
        arguments |= {"batch_size": job["batch"], "drop_last": job["drop_last"]}
    persistent = job["persistent"] and job["workers"] > 0
    loader = adopt(DataLoader(data, num_workers=job["workers"], persistent_workers=persistent, **arguments))
    own = arguments.get("generator") or torch.Generator()
    story: list[Any] = []
    for most in passes:
        for number, batch in enumerate(loader):
            story.append((flat(batch), torch.rand(1, generator=own).item()))
            torch.rand(1), random.random()  # training draws too (dropout)
            if number + 1 == most:
                break
        story.append(generators_now())
    return tuple(story)


jobs = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "size": st.integers(2, 60),
        "batch": st.integers(1, 7),
        "drop_last": st.booleans(),
        "sampler": st.sampled_from(sorted(SAMPLERS)),
        "workers": st.sampled_from([0, 0, 1, 2]),
        "persistent": st.booleans(),
    }
)
knobs = st.builds(Knobs, st.integers(0, 3), st.integers(1, 3), st.just(False), st.just(True))
TINY = {
    "seed": 0,
    "size": 2,
    "batch": 1,
    "drop_last": False,
    "sampler": "own generator",
    "workers": 1,
    "persistent": False,
}
LONG = {"seed": 1, "size": 50, "batch": 2, "drop_last": False, "sampler": "shuffled", "workers": 0, "persistent": False}


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    job=jobs,
    script=st.lists(knobs, min_size=1, max_size=4),
    keeps=st.lists(st.booleans(), max_size=4),
    passes=st.lists(st.none() | st.integers(1, 6), min_size=1, max_size=3),
)
@example(job=LONG, script=[Knobs(2), Knobs(1, 3), Knobs(3)], keeps=[True, False, True], passes=[None, None])
@example(job=LONG, script=[Knobs(2), Knobs(2, 3), Knobs(2, 1)], keeps=[True, False, True], passes=[None, None])
@example(job=LONG, script=[Knobs(2), Knobs(2, 3)], keeps=[True, False], passes=[14, 14, None])
@example(job={**LONG, "workers": 2, "persistent": True}, script=[Knobs(1)] * 2, keeps=[False], passes=[3, None, None])
@example(job={**LONG, "workers": 2}, script=[Knobs(1), Knobs(0), Knobs(3)], keeps=[False, True], passes=[7, None, None])
@example(job=TINY, script=[Knobs(0)], keeps=[], passes=[None, 1, None])
@example(job={**TINY, "workers": 0, "size": 7, "batch": 2}, script=[Knobs(3)], keeps=[], passes=[None, 2, 3])
def test_the_batches_are_those_of_the_plain_run_bit_for_bit(
    job: dict[str, Any], script: list[Knobs], keeps: list[bool], passes: list[int | None]
) -> None:
    plain = draw(job, passes)
    with tempfile.TemporaryDirectory() as folder, tuning(Path(folder), script, keeps) as one:
        assert draw(job, passes, one.trains) == plain
        record = one.record
        assert record.state != "left_alone", record.why
        if job == LONG:
            outcomes = [move.outcome for move in record.moves]
            # A pool whose workers start slowly may still be on trial when fifty samples have been drawn.
            ended = [outcome for outcome in outcomes if outcome != "trying"]
            assert ended == ["kept", "returned", "kept"][: len(ended)]
            assert len(ended) >= len(outcomes) - 1


class Uneven(Squares):
    """Every third sample takes long: of several workers the others would be done first."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.03 if index % 3 == 0 else 0.001)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_of_ours_keep_the_order_that_the_scripts_own_loader_keeps(tmp_path: Path, workers: int) -> None:
    """With at most one worker batches come in the sampler's order, also where the script does not ask for it."""
    loader = DataLoader(Uneven(120), batch_size=None, num_workers=workers, in_order=False)
    with tuning(tmp_path, [Knobs(3)]) as one:
        assert [index for _, index in one.trains(loader)] == list(range(120))
        assert [move.outcome for move in one.record.moves] == ["kept"]
