"""An augmentation is never frozen, wherever it hides; what is declared or found deterministic is kept."""

from __future__ import annotations

import os
import random
import secrets
import time
import uuid

import numpy as np
import pytest
import torch

from fulltilt import feed
from fulltilt.errors import DataError, UsageError
from fulltilt.feed.dataset_check import inspect
from fulltilt.feed.random_numbers import uniform

from .conftest import Drawn, Pixels, Transformed

v1 = pytest.importorskip("torchvision.transforms")
v2 = pytest.importorskip("torchvision.transforms.v2")

OWN_PYTHON = random.Random(1)
OWN_NUMPY = np.random.default_rng(1)
OWN_LEGACY = np.random.RandomState(1)
OWN_TORCH = torch.Generator().manual_seed(1)


def epochs(dataset, count=6, **options):
    with feed.loader(dataset, 7, num_workers=2, **options) as loader:
        return [torch.cat([_first(batch) for batch in loader]) for _ in range(count)], loader


def _first(batch):
    return batch[0] if isinstance(batch, list | tuple) else batch


def distinct_per_sample(drawn):
    """How many different versions each sample had over the epochs."""
    return [
        len({bytes(epoch[i].contiguous().view(-1).view(torch.uint8).numpy()) for epoch in drawn})
        for i in range(len(drawn[0]))
    ]


# --------------------------------------------------------------------------- declared stages


@pytest.mark.parametrize("workers", [0, 2])
def test_a_declared_decode_is_kept_and_the_augmentation_is_not(workers):
    with feed.loader(
        Pixels(20), 7, decode=lambda pair: (pair[0].float(), pair[1]), augment=double_or_not, num_workers=workers
    ) as loader:
        drawn = [torch.cat([images for images, _ in loader]) for _ in range(6)]
        assert loader.tier == "ram"
    assert any("all 20 samples are kept" in note for note in loader.notes)
    plain = torch.stack([Pixels(20)[i][0].float() for i in range(20)])
    assert all(
        torch.equal(images / (images.amax((1, 2, 3), True) / plain.amax((1, 2, 3), True)), plain) for images in drawn
    )
    assert sum(count > 1 for count in distinct_per_sample(drawn)) > 15


class DoubleOrNot(feed.augment.Augmentation):
    """Doubles a sample by chance."""

    def __call__(self, batch, seed, epoch, indices):
        images, labels = batch
        drawn = feed_uniform(seed, epoch, indices)
        return images * (1 + (drawn < 0.5).float())[:, None, None, None], labels


def feed_uniform(seed, epoch, indices):
    return uniform(seed, epoch, indices, 1)[:, 0]


double_or_not = DoubleOrNot()


def test_what_is_declared_is_not_read_twice():
    reads = []

    class Declared(Drawn):
        deterministic = True

    def draw(index):
        reads.append(index)
        return torch.tensor([index])

    with feed.loader(Declared(draw, 64), 8, num_workers=0, checks=2) as loader:
        list(loader)
    assert len(reads) == 64 + 2


def test_a_false_declaration_is_told_and_nothing_random_stays_kept():
    drawn, loader = epochs(Drawn(lambda i: i), decode=lambda index: torch.tensor([index, random.random()]))
    assert loader.tier == "none"
    assert any("not what the data set returns now" in note for note in loader.notes)
    assert min(distinct_per_sample(drawn)) > 4
    with feed.loader(Drawn(int), 7, decode=lambda i: torch.rand(2), residency="ram", num_workers=0) as loader:
        list(loader)
        with pytest.raises(DataError, match="no longer served"):
            list(loader)


def test_a_stage_that_is_no_function_and_a_key_that_is_no_text_are_refused():
    with pytest.raises(UsageError, match="decode is 3"):
        feed.loader(Pixels(), 4, decode=3)
    with pytest.raises(UsageError, match="cache_key is ''"):
        feed.loader(Pixels(), 4, cache_key="")


# --------------------------------------------------------------------------- nothing declared


@pytest.mark.parametrize(
    "transform",
    [
        v1.Compose([v1.Resize((12, 12)), v1.RandomHorizontalFlip(), v1.ToTensor()]),
        v1.Compose([v1.Resize((12, 12)), v1.ToTensor(), v1.RandomErasing(p=0.5)]),
        v2.Compose([v2.Resize((12, 12)), v2.ToImage(), v2.RandomApply([v2.ColorJitter(0.9)], p=0.5)]),
        torch.nn.Sequential(v2.PILToTensor(), v2.Resize((12, 12)), v2.RandomVerticalFlip()),
    ],
    ids=["v1", "v1-erasing", "v2-apply", "sequential"],
)
def test_random_transforms_are_drawn_anew(transform):
    drawn, loader = epochs(Transformed(transform))
    assert sum(count > 1 for count in distinct_per_sample(drawn)) > 15
    assert loader.tier == "none"
    assert "declare the stages: feed.loader(dataset, decode=..., augment=...)" in loader.notes[0]


def test_what_is_random_does_not_depend_on_workers_or_batches():
    transform = v1.Compose([v1.Resize((12, 12)), v1.ColorJitter(0.5), v1.ToTensor()])
    results = []
    for workers, batch_size in ((0, 3), (2, 7)):
        with feed.loader(Transformed(transform), batch_size, num_workers=workers, seed=4) as loader:
            results.append([torch.cat([image for image, _ in loader]) for _ in range(2)])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[0][1])


def test_a_rare_flip_is_found_although_two_draws_look_alike():
    dataset = Transformed(v1.Compose([v1.Resize((12, 12)), v1.RandomHorizontalFlip(p=0.001), v1.ToTensor()]))
    assert inspect(dataset).random_because is not None


RANDOM_CALLS = {
    "random": lambda i: random.random(),
    "numpy": lambda i: np.random.rand(),
    "torch": lambda i: torch.rand(1),
    "torch_inplace": lambda i: torch.empty(1).uniform_(),
    "own_python": lambda i: OWN_PYTHON.random(),
    "own_numpy": lambda i: OWN_NUMPY.random(),
    "own_legacy": lambda i: OWN_LEGACY.rand(),
    "own_torch": lambda i: torch.rand(1, generator=OWN_TORCH),
    "fresh_python": lambda i: random.Random().random(),
    "fresh_torch": lambda i: torch.Generator().seed() % 1000,
    "fresh_numpy": lambda i: np.random.default_rng().random(),
    "system": lambda i: random.SystemRandom().random(),
    "urandom": lambda i: int.from_bytes(os.urandom(3), "little"),
    "secrets": lambda i: secrets.randbelow(9999),
    "uuid": lambda i: uuid.uuid4().int % 9999,
    "clock_python": lambda i: random.Random(time.time_ns()).random(),
    "clock_numpy": lambda i: np.random.default_rng(time.time_ns()).random(),
    "torch_seed": lambda i: np.random.default_rng(torch.initial_seed() + i).random(),
}


@pytest.mark.parametrize("name", RANDOM_CALLS)
def test_a_random_call_hidden_in_getitem_is_found(name):
    call = RANDOM_CALLS[name]
    dataset = Drawn(lambda index: torch.tensor([float(index), float(call(index))]))
    assert inspect(dataset, workers=1).random_because is not None


@pytest.mark.parametrize(
    "draw",
    [
        lambda i: torch.tensor(random.Random(i).random()),
        lambda i: torch.from_numpy(np.random.default_rng(i).random(3)),
        lambda i: torch.rand(3, generator=torch.Generator().manual_seed(i)),
        lambda i: torch.full((2,), float("nan")),
        lambda i: torch.tensor(i + 0 * int(time.time())),
    ],
    ids=["random", "numpy", "torch", "nan", "a look at the clock"],
)
def test_numbers_that_follow_from_the_index_are_deterministic(draw):
    assert inspect(Drawn(draw)).random_because is None


@pytest.mark.parametrize("hidden", [random.random, np.random.rand, lambda: float(torch.rand(1))])
def test_hidden_randomness_is_drawn_anew_each_epoch(hidden):
    drawn, loader = epochs(Drawn(lambda i: torch.tensor([float(i), hidden()]), 20))
    assert "on every draw" in loader.notes[0]
    assert loader.tier == "none"
    assert set(distinct_per_sample(drawn)) == {6}
    assert len({float(row[1]) for row in drawn[0]}) == 20  # workers do not repeat one another


def test_a_sample_that_is_random_only_now_and_then_is_caught_when_it_is():
    """Not one of the samples drawn at the start is random: only the watch while filling can see it."""

    def draw(index):
        flip = 60 <= index < 63 and random.random() < 2
        return torch.tensor([float(index), random.random() if flip else 0.0])

    dataset = Drawn(draw, 120)
    assert inspect(dataset, checks=4).random_because is None
    drawn, loader = epochs(dataset, checks=4)
    assert any("draws random numbers; nothing is kept" in note for note in loader.notes)
    versions = distinct_per_sample(drawn)
    assert versions[60:63] == [6, 6, 6]
    with feed.loader(dataset, 7, num_workers=0, checks=4, residency="ram") as asked, pytest.raises(DataError):
        list(asked)


def test_a_data_set_that_changes_between_epochs_is_no_longer_served_from_memory(tmp_path):
    """Deterministic, and yet not the same in each epoch: a curriculum, kept where nobody looks for it."""
    stage = tmp_path / "stage"
    stage.write_text("0")
    dataset = Drawn(lambda index: torch.tensor([index, int(stage.read_text())]), 16)
    with feed.loader(dataset, 4, num_workers=0) as loader:
        assert int(next(iter(list(loader)))[0, 1]) == 0
        stage.write_text("1")
        assert {int(row[1]) for batch in loader for row in batch} == {1}
        assert any("not what the data set returns now" in note for note in loader.notes)


def test_an_augmentation_that_is_switched_on_later_is_not_frozen():
    """So rare that the samples compared at the start of the epoch look as they did."""

    class Switched(Drawn):
        training = False

        def __getitem__(self, index):
            flip = self.training and random.random() < 1e-9
            return torch.tensor([float(index), float(flip)])

    dataset = Switched(None, 20)
    with feed.loader(dataset, 5, num_workers=0) as loader:
        list(loader)
        assert loader.tier == "ram"
        dataset.training = True
        list(loader)
        assert loader.tier == "none"


def test_a_tier_by_name_is_refused_for_a_random_data_set():
    with pytest.raises(UsageError, match="cannot be kept in ram: sample 0 draws random numbers"):
        feed.loader(Drawn(lambda i: torch.rand(2)), 4, residency="ram")


def test_deterministic_lists_are_kept_whole():
    dataset = Transformed(v1.Compose([v1.Resize((12, 12)), v1.ToTensor(), v1.Normalize(0.5, 0.5)]))
    drawn, loader = epochs(dataset, 2)
    assert loader.tier == "ram"
    assert torch.equal(drawn[0], torch.stack([dataset[i][0] for i in range(20)]))
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_found_random_late_is_seeded_in_that_epoch_too(workers):
    """Only (seed, epoch, sample) decide, also where the sample is what tells that the data set is random."""
    dataset = Drawn(lambda index: torch.tensor([float(index), random.random() if index == 61 else 0.0]), 120)

    def drawn(seed, workers):
        random.seed(seed)
        with feed.loader(dataset, 7, num_workers=workers, checks=4) as loader:
            return [torch.cat([*loader]) for _ in range(2)]

    first, again = drawn(1, 0), drawn(2, workers)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(*first)


@pytest.mark.parametrize(("kind", "workers"), [("random", 0), ("random", 2), ("augmented", 0)])
def test_a_sample_drawn_several_times_in_an_epoch_is_augmented_anew_each_time(kind, workers):
    """As a WeightedRandomSampler does with rare classes: copies that are all alike would teach nothing."""
    dataset = {
        "random": Drawn(lambda i: torch.rand(3)),
        "augmented": torch.rand(6, 3, 4, 4),
    }[kind]
    jitter = [feed.augment.ColourJitter(0.5)] if kind == "augmented" else None
    with feed.loader(dataset, 4, sampler=[1, 1, 1, 2, 2, 1, 1, 1], augment=jitter, num_workers=workers) as loader:
        drawn = torch.cat([_first(batch) for _ in range(2) for batch in loader]).flatten(1)
    assert len(torch.unique(drawn, dim=0)) == len(drawn) == 16


def test_a_sample_that_is_changed_in_place_is_not_the_same():
    class Shrinking(torch.utils.data.Dataset):
        kept = torch.ones(4, 3)

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.kept[index].mul_(0.5)

    assert "is different" in (inspect(Shrinking()).random_because or "")
