"""Which batches a loader gives: samplers, ranks, resumes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

from fulltilt import feed
from fulltilt.errors import UsageError
from fulltilt.feed.epoch_order import SAMPLE_BITS, Order, numbered, spread

from .conftest import Drawn


@pytest.mark.parametrize("sample", [None, (1, None), np.array(["a"]), torch.eye(2).to_sparse(), 2**70])
def test_what_cannot_be_put_into_a_batch_is_told_at_once(sample):
    with pytest.raises(UsageError, match=r"cannot make a batch of these samples(.|\n)*A DataLoader takes a collate_fn"):
        feed.loader(Drawn(lambda index: sample), 4, num_workers=0)


# --------------------------------------------------------------------------- in the middle of an epoch


class Shuffled:
    def __init__(self, samples):
        self.samples, self.random = samples, random.Random(5)

    def __iter__(self):
        return iter(self.random.sample(range(self.samples), self.samples))

    def __len__(self):
        return self.samples


class Endless(Shuffled):
    def __iter__(self):
        while True:
            yield from super().__iter__()


@pytest.mark.parametrize(
    "given",
    [
        lambda data: {"batch_size": 4, "sampler": RandomSampler(data)},
        lambda data: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 20, 20)},
        lambda data: {"batch_size": 4, "sampler": RandomSampler(data, generator=torch.Generator().manual_seed(1))},
        lambda data: {"batch_size": 4, "sampler": Shuffled(20)},
    ],
    ids=["random", "weighted", "its own generator", "its own random numbers"],
)
def test_a_random_sampler_goes_on_with_the_samples_that_were_left(given):
    """It draws from the global generator, which a run that goes on has elsewhere."""

    def made():
        return feed.loader(data, num_workers=0, **given(data))

    data = Drawn(torch.tensor)
    torch.manual_seed(0)
    whole = made()
    state_before = torch.get_rng_state()
    epochs = [[batch.tolist() for batch in whole] for _ in range(3)]
    assert epochs[0] != epochs[1]
    assert torch.equal(state_before, torch.get_rng_state())
    first = made()
    passing = iter(first)
    seen = [next(passing).tolist() for _ in range(2)]
    torch.manual_seed(99)
    resumed = made()
    resumed.load_state_dict(first.state_dict())
    assert seen + [batch.tolist() for batch in resumed] == epochs[0]
    for epoch in (2, 1):
        resumed.begin_at(epoch, 3)
        assert [batch.tolist() for batch in resumed] == epochs[epoch][3:]


@pytest.mark.parametrize("made", ["in each epoch", "once"])
def test_the_epoch_that_the_sampler_was_told_is_drawn(made):
    """As scripts for several GPUs do, also when they go on in the sixth epoch: it began with the first one's order."""
    dataset = Drawn(lambda i: torch.tensor([i]), 21)
    sampler, reference = (DistributedSampler(dataset, 2, 1, shuffle=True) for _ in range(2))

    def loader():
        return feed.loader(dataset, 4, sampler=sampler, num_workers=0)

    kept = loader()
    for epoch in (5, 6, 8):
        sampler.set_epoch(epoch)
        reference.set_epoch(epoch)
        loading = kept if made == "once" else loader()
        batches = list(loading)
        expected = DataLoader(dataset, 4, sampler=reference)
        assert [b.flatten().tolist() for b in batches] == [b.flatten().tolist() for b in expected]
        assert loading.state_dict()["epoch"] == epoch + 1
        assert loading.sampler is sampler
    kept.set_epoch(5)  # told itself, a loader heeds that
    sampler.set_epoch(8)
    reference.set_epoch(5)
    assert [b.flatten().tolist() for b in kept] == [
        b.flatten().tolist() for b in DataLoader(dataset, 4, sampler=reference)
    ]


def test_ranks_draw_other_samples_from_a_sampler_that_knows_of_none():
    def drawn(rank):
        sampler = WeightedRandomSampler([1.0] * 50, 50)
        with feed.loader(Drawn(lambda i: i, 50), 50, num_workers=0, sampler=sampler, rank=rank, world_size=2) as loader:
            return [batch.tolist() for _ in range(2) for batch in loader]

    first, second = drawn(0), drawn(1)
    assert first == drawn(0)
    assert all(mine != others for mine, others in zip(first, second, strict=True))


def test_a_sampler_without_an_end_is_refused():
    endless = feed.loader(Drawn(torch.tensor), 4, sampler=Endless(20), num_workers=0)
    with endless as loader, pytest.raises(UsageError, match="does not end"):
        next(iter(loader))


def test_another_batch_size_or_other_ranks_go_on_after_the_same_samples():
    data = Drawn(torch.tensor, 24)

    def made(batch_size, rank=0, world_size=1):
        return feed.loader(data, batch_size, shuffle=True, num_workers=0, rank=rank, world_size=world_size)

    first = made(4)
    passing = iter(first)
    seen = [int(i) for _ in range(3) for i in next(passing)]
    for batch_size, world_size in ((2, 1), (6, 1), (2, 2), (1, 3)):
        left = []
        for rank in range(world_size):
            resumed = made(batch_size, rank, world_size)
            resumed.load_state_dict(first.state_dict())
            left += [int(i) for batch in resumed for i in batch]
        assert sorted(seen + left) == list(range(24))
    with pytest.raises(UsageError, match="in the middle of a batch of 5"):
        made(5).load_state_dict(first.state_dict())
    with pytest.raises(UsageError, match="not the state of a loader"):
        made(4).load_state_dict({"epoch": 1})


def test_seeds_of_any_size_and_a_share_that_is_none():
    data = Drawn(lambda index: torch.rand(1))
    for seed in (-1, 2**63, 2**80):
        assert len(list(feed.loader(data, 4, shuffle=True, seed=seed, num_workers=0))) == 5
    with pytest.raises(UsageError, match="max_bad_share is -3"):
        feed.loader(data, 4, max_bad_share=-3)
    with pytest.raises(UsageError, match="batch_size is True"):
        feed.loader(data, True)


@given(
    samples=st.integers(1, 200),
    batch=st.integers(1, 50),
    world=st.integers(1, 5),
    shuffle=st.booleans(),
    drop=st.booleans(),
    epoch=st.integers(0, 5),
)
@settings(max_examples=80, deadline=None)
def test_ranks_cover_the_epoch_with_equally_many_batches(samples, batch, world, shuffle, drop, epoch):
    orders = [Order(samples, batch, shuffle, 3, drop, rank, world) for rank in range(world)]
    batches = [order.batches(epoch) for order in orders]
    assert len({len(mine) for mine in batches}) == 1
    assert all(len(mine) == order.batches_per_epoch() for mine, order in zip(batches, orders, strict=True))
    drawn = [int(i) for mine in batches for indices in mine for i in indices]
    if drop:
        assert all(len(indices) == batch for mine in batches for indices in mine)
    else:
        assert set(drawn) == set(range(samples))
        assert len(drawn) - samples < world or samples < world


def test_checks_are_spread_over_the_whole_data_set():
    assert list(spread(100, 5)) == [0, 24, 49, 74, 99]
    assert list(spread(2, 8)) == [0, 1]
    assert list(spread(1, 8)) == [0]


def test_samples_drawn_once_are_not_sorted(monkeypatch):
    """With a sampler of a hundred million samples the first batch waited for it; a repeated one is still numbered."""
    batches = list(torch.split(torch.randperm(100), 8))
    repeated = [*batches, torch.tensor([int(batches[0][0])])]
    assert int(numbered(repeated)[-1][0]) == int(batches[0][0]) + (1 << SAMPLE_BITS)
    monkeypatch.setattr(torch, "sort", None)
    assert numbered(batches) is batches


@pytest.mark.parametrize("as_given", [int, float, np.int32, torch.tensor, str], ids=lambda kind: kind.__name__)
def test_a_sampler_may_give_numbers_of_any_kind(as_given):
    order = Order(samples=10, batch_size=4, sampler=[as_given(number) for number in (3, 1, 2, 9, 9)])
    assert [batch.tolist() for batch in order.batches(0)] == [[3, 1, 2, 9], [9]]
