"""feed.loader iterates like a DataLoader and serves what the data set returns, on every tier and with any workers."""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import re
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

from fulltilt import feed
from fulltilt.errors import DataError, MachineError, UsageError
from fulltilt.feed.sample_reader import ShapesDiffer

from .conftest import Drawn, Pixels

TIERS = ["auto", "ram", "disk", "none"]


def check(dataset, batch):
    images, labels = batch
    assert images.is_contiguous()
    for image, label in zip(images, labels, strict=True):
        assert torch.equal(image, dataset[int(label)][0])


@pytest.mark.parametrize("residency", TIERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_every_epoch_serves_every_sample_once_and_unchanged(residency, workers, cache_dir):
    dataset = Pixels(23)
    with feed.loader(dataset, 5, shuffle=True, residency=residency, num_workers=workers, cache_dir=cache_dir) as loader:
        orders = []
        for _ in range(3):
            batches = list(loader)
            assert len(batches) == len(loader) == 5
            for batch in batches:
                check(dataset, batch)
            orders.append([int(label) for _, labels in batches for label in labels])
            assert sorted(orders[-1]) == list(range(23))
        assert orders[0] != orders[1]


def test_order_is_that_of_the_distributed_sampler():
    dataset = Pixels(23)
    for world in (1, 3):
        for rank in range(world):
            sampler = DistributedSampler(dataset, world, rank, shuffle=True, seed=7)
            sampler.set_epoch(4)
            loader = feed.loader(dataset, 4, shuffle=True, seed=7, rank=rank, world_size=world, num_workers=0)
            loader.set_epoch(4)
            assert [int(label) for _, labels in loader for label in labels] == list(sampler)
            loader.close()


def test_ranks_share_an_epoch_and_have_equally_many_batches():
    seen, lengths = [], set()
    for rank in range(3):
        with feed.loader(Pixels(22), 4, shuffle=True, rank=rank, world_size=3, num_workers=0) as loader:
            batches = list(loader)
            lengths.add(len(batches))
            seen += [int(label) for _, labels in batches for label in labels]
    assert len(lengths) == 1
    assert set(seen) == set(range(22))
    assert len(seen) == 24  # two are repeated so that no rank waits for another


def test_a_sampler_a_subset_and_drop_last():
    dataset = Pixels(23)
    picks = [3, 3, 9, 1, 22, 0, 9]
    with feed.loader(dataset, 3, sampler=picks, num_workers=2, drop_last=True) as loader:
        for _ in range(2):
            assert [label.tolist() for _, label in loader] == [[3, 3, 9], [1, 22, 0]]
        assert len(loader) == 2
    subset = Subset(dataset, [5, 6, 7, 8])
    with feed.loader(subset, 3, num_workers=0) as loader:
        assert [label.tolist() for _, label in loader] == [[5, 6, 7], [8]]


def test_samples_that_one_epoch_left_out_are_read_in_the_next():
    class Changing:
        def __init__(self):
            self.epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(range(5) if self.epoch == 0 else range(3, 12))

        def __len__(self):
            return 5 if self.epoch == 0 else 9

    dataset = Pixels(12)
    with feed.loader(dataset, 4, sampler=Changing(), num_workers=2, residency="ram") as loader:
        for expected in (range(5), range(3, 12), range(3, 12)):
            batches = list(loader)
            assert [int(label) for _, labels in batches for label in labels] == list(expected)
            for batch in batches:
                check(dataset, batch)


@pytest.mark.parametrize("residency", ["ram", "none"])
def test_leaving_an_epoch_early_loses_nothing(residency):
    dataset = Pixels(40)
    with feed.loader(dataset, 4, shuffle=True, residency=residency, num_workers=2) as loader:
        for _ in range(3):
            for number, batch in enumerate(loader):
                check(dataset, batch)
                if number == 2:
                    break
        batches = list(loader)
        assert sorted(int(label) for _, labels in batches for label in labels) == list(range(40))


def test_resume_goes_on_with_the_very_next_batch():
    def make():
        return feed.loader(Pixels(23), 4, shuffle=True, seed=3, num_workers=0, augment=feed.augment.HorizontalFlip())

    whole = make()
    expected = [batch for _ in range(2) for batch in whole]
    interrupted, resumed = make(), make()
    iterator = iter(interrupted)
    taken = [next(iterator) for _ in range(4)]
    resumed.load_state_dict(interrupted.state_dict())
    rest = [batch for _ in range(2) for batch in resumed]
    assert len(taken) + len(rest) == len(expected)
    for (image, label), (image_expected, label_expected) in zip(taken + rest, expected, strict=True):
        assert torch.equal(label, label_expected)
        assert torch.equal(image, image_expected)
    iterator.close()
    with pytest.raises(UsageError, match="seed"):
        feed.loader(Pixels(3), 1, seed=1, num_workers=0).load_state_dict(resumed.state_dict())


def test_structures_keep_their_shape():
    Pair = namedtuple("Pair", "left right")

    def draw(index):
        return {
            "x": torch.full((2,), float(index)),
            "pair": Pair(index, 0.5 * index),
            "list": [torch.tensor(index > 3)],
        }

    with feed.loader(Drawn(draw, 8), 3, num_workers=0) as loader:
        first = next(iter(loader))
    assert first["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert first["pair"].left.tolist() == [0, 1, 2]
    assert first["pair"].right.dtype == torch.float64  # as default_collate does
    assert first["list"][0].dtype == torch.bool


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_number_in_either_byte_order_is_served(order):
    """An array with no dimension, as a file of the other byte order gives it."""
    with feed.loader(Drawn(lambda i: np.array(i / 2, dtype=f"{order}f4"), 5), 5, num_workers=0) as loader:
        (batch,) = loader
    assert batch.dtype == torch.float32
    assert batch.tolist() == [0, 0.5, 1, 1.5, 2]


def test_conjugates_and_negatives_are_served_as_the_numbers_they_stand_for():
    """torch keeps ``x.conj()`` and its imaginary part as marks on ``x``, as Fourier transforms leave them."""
    dataset = Drawn(lambda i: (torch.tensor([1 + 2j * i, 3 - 1j]).conj(), torch.tensor([1 + 2j * i]).conj().imag), 6)
    with feed.loader(dataset, 3, num_workers=0) as loader:
        for _ in range(2):
            for got, expected in zip(loader, DataLoader(dataset, 3), strict=True):
                assert all(map(torch.equal, got, expected))


def test_one_element_out_of_a_wider_tensor_is_served():
    dataset = Drawn(lambda i: torch.arange(40)[::2][i : i + 1], 20)
    dataset.weight = torch.arange(4)[::2][:1]
    with feed.loader(dataset, 20, num_workers=0) as loader:
        assert [batch.flatten().tolist() for batch in loader] == [list(range(0, 40, 2))]


def test_a_kept_batch_belongs_to_the_caller():
    with feed.loader(Pixels(20), 4, num_workers=2) as loader:
        first = [image.clone() for image, _ in loader]
        kept = [image for image, _ in loader]
        for image in kept:
            image.zero_()
        assert all(torch.equal(a, b) for a, (b, _) in zip(first, loader, strict=True))


@pytest.mark.parametrize("residency", ["ram", "disk", "none"])
def test_weights_after_fifty_steps_equal_those_of_a_plain_dataloader(residency, cache_dir):
    dataset = Pixels(40, size=6)

    def train(batches):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.ReLU(), nn.Linear(16, 40))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for images, labels in batches:
            loss = nn.functional.cross_entropy(model(images.float() / 255), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    sampler = DistributedSampler(dataset, 1, 0, shuffle=True, seed=5)

    def plain():
        for epoch in range(10):
            sampler.set_epoch(epoch)
            yield from DataLoader(dataset, 8, sampler=sampler)

    with feed.loader(
        dataset, 8, shuffle=True, seed=5, residency=residency, num_workers=2, cache_dir=cache_dir
    ) as loader:
        ours = train(batch for _ in range(10) for batch in loader)
    assert torch.equal(ours, train(plain()))


def test_random_state_of_the_user_is_left_alone():
    import random

    import numpy

    def state():
        return random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()

    before = state()
    with feed.loader(
        Drawn(lambda i: torch.rand(3) + random.random() + numpy.random.rand(), 9), 4, num_workers=0
    ) as loader:
        list(loader)
    after = state()
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batched_fetch_is_used_and_a_bad_sample_in_it_still_named(workers):
    class Batched(Pixels):
        calls = 0

        def __getitems__(self, indices):
            Batched.calls += 1
            if 7 in indices and self.samples == 24:
                raise ValueError("one of them is bad")
            return [self[index] for index in indices]

        def __getitem__(self, index):
            if index == 7 and self.samples == 24:
                raise ValueError("this one is bad")
            return super().__getitem__(index)

    with feed.loader(Batched(23), 5, num_workers=workers) as loader:
        for batch in loader:
            check(loader.dataset, batch)
    if workers == 0:
        assert Batched.calls == 5
    with (
        feed.loader(Batched(24), 5, num_workers=workers, checks=2) as loader,
        pytest.raises(DataError, match="sample 7 cannot be read: ValueError: this one is bad"),
    ):
        list(loader)


def test_fill_decodes_everything_before_training():
    reads = []

    def draw(index):
        reads.append(index)
        return torch.full((4,), index)

    with feed.loader(Drawn(draw, 12), 5, num_workers=0, checks=2) as loader:
        loader.fill()
        assert loader.tier == "ram"
        assert any("all 12 samples are kept" in note for note in loader.notes)
        filled = len(reads)
        list(loader)
        assert (
            len(reads) - filled <= 3
        )  # two samples are compared with the data set, one of them is read before to find its generators


# --------------------------------------------------------------------------- bad input


def corrupt(index):
    if index == 5:
        raise OSError("image file is truncated")
    return torch.full((3,), index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_sample_stops_the_job_and_is_named(workers):
    dataset = Drawn(corrupt, 20)
    dataset.files = [f"/data/{i}.jpg" for i in range(20)]
    with (
        feed.loader(dataset, 4, num_workers=workers, checks=2) as loader,
        pytest.raises(
            DataError, match=r"sample 5 \(/data/5.jpg\) cannot be read: OSError: image file is truncated"
        ) as stop,
    ):
        list(loader)
    assert re.search(r"truncated \(test_loader\.py, line \d+, in corrupt\)\n", str(stop.value))
    with pytest.raises(DataError, match=r"sample 0 cannot be read: NameError: .*, line \d+, in <lambda>\)"):
        feed.loader(Drawn(lambda index: misspelled + index, 4), 2, num_workers=workers)  # noqa: F821


@pytest.mark.parametrize("residency", ["ram", "disk", "none"])
def test_corrupt_samples_are_skipped_up_to_a_share(residency, caplog, cache_dir):
    options = {"num_workers": 2, "checks": 2, "on_bad_sample": "skip", "residency": residency, "cache_dir": cache_dir}
    with feed.loader(Drawn(corrupt, 20), 4, **options) as loader, caplog.at_level(logging.WARNING):
        for _ in range(3):
            batches = list(loader)
            assert len(batches) == len(loader)
            assert sorted(int(row[0]) for batch in batches for row in batch) == [i for i in range(20) if i != 5]
    assert "skipped sample 5" in caplog.text

    def often(index):
        if index % 4 == 1:
            raise ValueError("bad")
        return torch.zeros(1)

    with (
        feed.loader(Drawn(often, 40), 4, num_workers=0, checks=2, on_bad_sample="skip") as loader,
        pytest.raises(DataError, match=r"more than the 1\.0% allowed"),
    ):
        list(loader)


def sometimes(index):
    if index in (5, 6):
        raise OSError("image file is truncated")
    return torch.full((3,), index)


@pytest.mark.parametrize("kind", ["ram", "none", "random"])
def test_a_batch_of_bad_samples_is_passed_over_and_counted_in_a_resume(kind):
    def draw(index):
        sample = sometimes(index)
        return sample + 0 * torch.rand(3) if kind == "random" else sample

    def made(world_size=1):
        where = "ram" if kind == "ram" else "none"
        policy = {"on_bad_sample": "skip", "max_bad_share": 0.1, "checks": 2}
        return feed.loader(
            Drawn(draw, 20), 2, residency=where, num_workers=0, sampler=[*range(1, 20)], world_size=world_size, **policy
        )

    def numbers(batch):
        return batch[:, 0].int().tolist()

    with made() as loader, made() as resumed:
        expected = [[1, 2], [3, 4], *([i, i + 1] for i in range(7, 19, 2)), [19]]
        for _ in range(3):
            assert [numbers(batch) for batch in loader] == expected
        for epoch in range(2):  # in the first one it is not known yet which samples are bad
            loader.set_epoch(epoch)
            passing = iter(loader)
            assert [numbers(next(passing)) for _ in range(3)] == expected[:3]
            resumed.load_state_dict(loader.state_dict())
            assert [numbers(batch) for batch in resumed] == expected[3:]
    with made(world_size=2) as loader, pytest.raises(DataError, match="the other ranks count on it"):
        list(loader)


def test_parts_of_a_sample_that_share_a_name_are_not_taken_for_each_other():
    def draw(index):
        parts = {1: torch.tensor(index), "1": torch.tensor(-index), "a.b": index, "a": {"b": 2 * index}}
        return parts if index % 2 else dict(reversed(parts.items()))

    with feed.loader(Drawn(draw, 6), 3, num_workers=0) as loader:
        for _ in range(2):
            assert [batch[1].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_workers_and_memory_that_the_system_refuses_are_told(monkeypatch):
    def refused(*_):
        raise OSError(24, "Too many open files")

    with feed.loader(Pixels(8), 4, num_workers=2) as loader, monkeypatch.context() as patch:
        patch.setattr(multiprocessing.get_context("fork").Process, "start", refused)
        with pytest.raises(MachineError, match="2 loader workers cannot be started: Too many open files"):
            list(loader)
        with pytest.raises(MachineError, match="2 loader workers cannot be started: Too many open files"):
            feed.loader(Pixels(8), 4, num_workers=2)
        patch.setattr(mmap, "mmap", refused)
        with feed.loader(Pixels(8), 4, num_workers=0) as other:
            other.fill()
            assert other.tier == "none"
            assert "cannot allocate" in other.notes[0]


def test_samples_of_different_shapes_are_named():
    with pytest.raises(DataError, match=r"sample \d+ differs from the first sample: .*\[3, 5\] instead of .*\[3, 4\]"):
        feed.loader(Drawn(lambda i: torch.zeros(3, 4 if i < 10 else 5), 20), 4)
    odd = Drawn(lambda i: torch.zeros(3, 5 if i == 7 else 4), 20)
    with feed.loader(odd, 4, num_workers=0, checks=2) as loader, pytest.raises(DataError, match=r"sample 7 differs"):
        list(loader)


def test_what_cannot_be_a_tensor_is_left_to_the_dataloader():
    with pytest.raises(UsageError, match="is str, which is not a tensor") as refused:
        feed.loader(Drawn(lambda i: (torch.full((2,), i), f"name {i}"), 6), 4, num_workers=0)
    assert "keep the DataLoader" in str(refused.value.remedy)


def test_mistakes_are_told_in_a_sentence():
    with pytest.raises(UsageError, match="unknown"):
        feed.loader(Pixels(4), 2, residency="moon")
    with pytest.raises(UsageError, match="no such memory"):
        feed.loader(Pixels(4), 2, residency="vram", device="cpu")
    with pytest.raises(UsageError, match="batch_size"):
        feed.loader(Pixels(4), 0)
    with pytest.raises(DataError, match="empty"):
        feed.loader(Pixels(0), 2)
    with pytest.raises(UsageError, match="no length"):
        feed.loader(iter([1, 2]), 2)
    with pytest.raises(UsageError, match="sampler"):
        feed.loader(Pixels(4), 2, sampler=[1], shuffle=True)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"seed": "a"}, "seed is 'a'"),
        ({"collate_fn": torch.stack}, "has no collate_fn"),
        ({"sampler": 5}, "cannot be iterated"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not below"),
        ({"rank": "0", "world_size": 2}, "rank is '0' and world_size 2"),
        ({"rank": 0, "world_size": 1.5}, "rank is 0 and world_size 1.5"),
        ({"num_workers": "2"}, "num_workers is '2'; it must be a whole number from 0 to 1,024"),
        ({"num_workers": 1025}, "num_workers is 1025"),
        ({"device": 1.5}, "device 1.5 is unknown"),
        ({"batch_size": 10**30}, "batch_size is 1000"),
        ({"max_bad_share": "x"}, "max_bad_share is 'x'; it must be from 0 to 1"),
        ({"checks": "x"}, "checks is 'x'; it must be a whole number"),
        ({"cache_dir": 5}, "cache_dir is 5; it must be a folder"),
        ({"batch_size": True}, "batch_size is True"),
    ],
)
def test_an_argument_of_a_wrong_type_is_told_in_a_sentence(given, told):
    with pytest.raises(UsageError, match=told), feed.loader(Pixels(4), **{"num_workers": 0, **given}) as loader:
        list(loader)


@pytest.mark.parametrize("batch", [-1, 1.5, "2", None])
def test_a_position_that_is_none_is_told(batch):
    with feed.loader(Pixels(4), np.int64(2), num_workers=0) as loader:
        assert len(list(loader)) == 2  # NumPy's whole numbers will do
        with pytest.raises(UsageError, match="whole numbers"):
            loader.begin_at(0, batch)
        with pytest.raises(UsageError, match="whole numbers"):
            loader.load_state_dict({"epoch": 0, "batch": batch})
        with pytest.raises(UsageError, match="not the state of a loader"):
            loader.load_state_dict(None)
        loader.begin_at(3, 1)
        assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (3, 1)


def test_a_daemon_process_goes_without_workers():
    def train(to):
        to.send(len(list(feed.loader(Pixels(4), 2))))

    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert mine.recv() == 2
    process.join()


def test_a_killed_worker_is_explained():
    import os
    import signal

    parent = os.getpid()

    def draw(index):
        if index == 9 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(2)

    with (
        feed.loader(Drawn(draw, 40), 4, num_workers=2, checks=2) as loader,
        pytest.raises(MachineError, match="got SIGKILL, most likely from the OOM killer"),
    ):
        list(loader)


@pytest.mark.parametrize("residency", ["ram", "disk"])
def test_a_torch_without_numpy_will_do(monkeypatch, tmp_path, residency):
    def refused(*_):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", refused)
    with feed.loader(Pixels(8), 4, num_workers=0, residency=residency, cache_dir=tmp_path, cache_key="k") as loader:
        assert [len(batch) for _ in range(2) for batch, _ in loader] == [4] * 4
        assert loader.tier == residency


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("none", [0, 2, 12], ids=["the first", "looked at", "not looked at"])
def test_none_for_a_bad_sample_is_skipped_wherever_it_stands(none, workers):
    """Data sets return None for a file that cannot be read; among the samples looked at first, it ended the job."""
    dataset = Drawn(lambda index: None if index == none else torch.tensor(index), samples=20)
    with feed.loader(dataset, 5, num_workers=workers, on_bad_sample="skip", max_bad_share=0.1) as loader:
        for _ in range(2):
            assert sorted(torch.cat(list(loader)).tolist()) == [index for index in range(20) if index != none]
        assert any(f"skipped sample {none}:" in note for note in loader.notes)


def test_shapes_of_which_no_kind_prevails_are_told_under_skip_too():
    ragged = Drawn(lambda index: torch.zeros(index + 1), samples=20)
    with pytest.raises(ShapesDiffer, match="differs from the first sample"):
        feed.loader(ragged, 5, num_workers=0, on_bad_sample="skip")
