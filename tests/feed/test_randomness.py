"""An augmentation is never frozen, wherever it hides; what is deterministic is not mistaken for random."""

from __future__ import annotations

import functools
import itertools
import os
import random
import secrets
import sys
import time
import types
import uuid

import numpy as np
import pytest
import torch

from fulltilt import feed
from fulltilt.errors import DataError, UsageError
from fulltilt.feed.generators import Generators
from fulltilt.feed.inspection import inspect
from fulltilt.feed.randomness import first_reason

from .conftest import Drawn, Transformed

v1 = pytest.importorskip("torchvision.transforms")
v2 = pytest.importorskip("torchvision.transforms.v2")

OWN_PYTHON = random.Random(1)
OWN_NUMPY = np.random.default_rng(1)
OWN_LEGACY = np.random.RandomState(1)
OWN_TORCH = torch.Generator().manual_seed(1)


class Keyword:
    """Albumentations-style: called with keywords, returns a dict, draws from generators of its own."""

    def __init__(self, transforms, seed=0):
        self.transforms = transforms
        del seed

    def __call__(self, **data):
        for transform in self.transforms:
            data = transform(**data)
        return data


class Shrink:
    def __call__(self, image, mask):
        return {"image": image[::2, ::2].copy(), "mask": mask[::2, ::2].copy()}


class KeywordFlip:
    def __init__(self, p):
        self.p = p
        self.py_random = random.Random(0)

    def __call__(self, image, mask):
        if self.py_random.random() < self.p:
            return {"image": image[:, ::-1].copy(), "mask": mask[:, ::-1].copy()}
        return {"image": image, "mask": mask}


class Segmentation:
    def __init__(self, transform, samples=20):
        self.transform = transform
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        image = np.random.default_rng(index).integers(0, 255, (16, 12, 3), dtype=np.uint8)
        done = self.transform(image=image, mask=image[..., 0])
        return done["image"], done["mask"]


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


@pytest.mark.parametrize(
    "transform",
    [
        v1.Compose([v1.Resize((12, 12)), v1.RandomHorizontalFlip(), v1.ToTensor()]),
        v1.Compose([v1.Resize((12, 12)), v1.ToTensor(), v1.RandomErasing(p=0.5)]),
        v2.Compose(
            [v2.Resize((12, 12)), v2.ToImage(), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
        ),
        v2.Compose([v2.Resize((12, 12)), v2.ToImage(), v2.RandomApply([v2.ColorJitter(0.9)], p=0.5)]),
        torch.nn.Sequential(v2.PILToTensor(), v2.Resize((12, 12)), v2.RandomVerticalFlip()),
    ],
    ids=["v1", "v1-erasing", "v2", "v2-apply", "sequential"],
)
def test_torchvision_lists_are_cut_and_their_tail_is_drawn_anew(transform):
    dataset = Transformed(transform)
    assert inspect(dataset).split is not None
    drawn, loader = epochs(dataset)
    assert any("done once: " in note for note in loader.notes)
    versions = distinct_per_sample(drawn)
    assert sum(count > 1 for count in versions) > 15  # a frozen one would give 1 for all


def test_reading_is_done_once_before_a_list_that_begins_with_a_random_transform():
    reads = []

    class Counted(Transformed):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    dataset = Counted(v1.Compose([v1.RandomResizedCrop(8), v1.ToTensor()]))
    with feed.loader(dataset, 7, num_workers=0) as loader:
        drawn = [torch.cat([image for image, _ in loader])]
        reads.clear()
        drawn += [torch.cat([image for image, _ in loader]) for _ in range(4)]
    assert reads == []
    assert min(distinct_per_sample(drawn)) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_first_part_of_another_shape_is_drawn_whole(workers):
    """All samples drawn at the start agree in size; one that comes later does not, and its crop is as good."""

    class Odd(Transformed):
        def __getitem__(self, index):
            from PIL import Image

            size = (30, 31) if index == 7 else (20, 24)
            return self.transform(Image.new("RGB", size, (index, 0, 0))), index

    dataset = Odd(v1.Compose([v1.RandomCrop(8), v1.ToTensor()]))
    with feed.loader(dataset, 7, num_workers=workers, checks=2) as loader:
        assert any("done once" in note for note in loader.notes)
        for _ in range(3):
            for images, labels in loader:
                assert torch.equal((images[:, 0, 0, 0] * 255).round().long(), labels)


def test_a_cut_serves_what_the_data_set_would_return_with_the_same_seed():
    transform = v2.Compose([v2.Resize((12, 12)), v2.ToImage(), v2.RandomHorizontalFlip(), v2.RandomErasing(p=0.5)])
    cut, _ = epochs(Transformed(transform), 2, seed=9)
    whole, _ = epochs(Transformed(transform), 2, seed=9, residency="none")
    assert all(torch.equal(a, b) for a, b in zip(cut, whole, strict=True))


def test_what_is_random_does_not_depend_on_workers_or_batches():
    transform = v1.Compose([v1.Resize((12, 12)), v1.ColorJitter(0.5), v1.ToTensor()])
    results = []
    for workers, batch_size in ((0, 3), (2, 7)):
        with feed.loader(Transformed(transform), batch_size, num_workers=workers, seed=4) as loader:
            results.append([torch.cat([image for image, _ in loader]) for _ in range(2)])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[0][1])


def test_albumentations_style_callables_are_cut_and_drawn_anew():
    dataset = Segmentation(Keyword([Shrink(), KeywordFlip(0.5)]))
    found = inspect(dataset)
    assert found.split is not None
    assert found.split.names() == (["Shrink"], ["KeywordFlip"])
    with feed.loader(dataset, 7, num_workers=2) as loader:
        drawn = [[torch.cat(parts) for parts in zip(*loader, strict=True)] for _ in range(6)]
    assert sum(count > 1 for count in distinct_per_sample([images for images, _ in drawn])) > 12
    for images, masks in drawn:
        assert torch.equal(images[..., 0], masks)  # the mask moved with its image


def test_a_rare_flip_is_found_although_two_draws_look_alike():
    dataset = Transformed(v1.Compose([v1.Resize((12, 12)), v1.RandomHorizontalFlip(p=0.001), v1.ToTensor()]))
    assert inspect(dataset).random_because is not None


def _now():
    return time.time_ns()


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
    "fresh_torch": lambda i: torch.Generator().seed(),
    "fresh_numpy": lambda i: np.random.default_rng().random(),
    "system": lambda i: random.SystemRandom().random(),
    "urandom": lambda i: os.urandom(1),
    "secrets": lambda i: secrets.randbelow(9),
    "uuid": lambda i: uuid.uuid4(),
    "clock_python": lambda i: random.Random(time.time_ns()).random(),
    "clock_numpy": lambda i: np.random.default_rng(int(time.time() * 1e6)).random(),
    "clock_elsewhere": lambda i: np.random.default_rng(_now()).random(),
    "process": lambda i: np.random.default_rng(os.getpid() + i).random(),
    "torch_seed": lambda i: np.random.default_rng(torch.initial_seed() + i).random(),
    "choice": lambda i: random.choice([1, 2]),
    "shuffle": lambda i: np.random.shuffle([1, 2]),
}


@pytest.mark.parametrize("name", RANDOM_CALLS)
def test_a_random_call_hidden_in_getitem_is_found_without_its_effect(name):
    call = RANDOM_CALLS[name]

    def draw(index):
        call(index)  # drawn, and without effect on the sample: only the witnesses can tell
        return torch.full((2,), index)

    dataset = Drawn(draw)
    assert first_reason(lambda i: dataset[i], [0, 3], Generators(dataset)) is not None
    drawn = inspect(Drawn(lambda index: torch.full((2,), float(index)) + int(index >= 0)))
    assert drawn.random_because is None


class Ops:
    """Where people put a generator, other than in the data set."""

    shared = torch.Generator().manual_seed(1)

    @staticmethod
    def by_static_method():
        OWN_NUMPY.random()

    @classmethod
    def by_class_method(cls):
        torch.rand(1, generator=cls.shared)

    @property
    def own(self):
        return OWN_LEGACY

    def by_property(self):
        self.own.rand()

    def lazily(self):
        if not hasattr(self, "made"):
            self.made = np.random.default_rng(1)
        self.made.random()


@functools.cache
def made_once():
    return np.random.default_rng(1)


def numbers():
    own = np.random.default_rng(1)
    while True:
        yield own.random()


AUGS = types.ModuleType("fulltilt_test_augs")
sys.modules[AUGS.__name__] = AUGS
exec("import random\nOWN = random.Random(1)\ndef flip():\n    return OWN.getrandbits(1)", vars(AUGS))


def from_an_import_within():
    import fulltilt_test_augs as augs

    augs.flip()


PLACES = {
    "static method": lambda: Ops.by_static_method,
    "class method": lambda: Ops.by_class_method,
    "property": lambda: Ops().by_property,
    "made with the first sample": lambda: Ops().lazily,
    "partial": lambda: functools.partial(torch.rand, 1, generator=torch.Generator()),
    "bound method": lambda: np.random.default_rng(1).random,
    "built-in method": lambda: random.Random(1).getrandbits.__self__.random,
    "kept by a cache": lambda: lambda: made_once().random(),
    "generator function": lambda: numbers().__next__,
    "another module": lambda: lambda: bool(AUGS.flip()),
    "a module imported within": lambda: from_an_import_within,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_generator_is_found_wherever_it_is_kept(place):
    call = PLACES[place]()

    def draw(index):
        call()
        return torch.full((2,), index)

    assert "draws random numbers" in (inspect(Drawn(draw)).random_because or "")
    moved = Generators(call)  # the listener that hears built-in calls is deaf in the workers: they have to see it
    before = moved.mark()
    call()
    assert before != moved.mark() or place == "made with the first sample"


def test_a_generator_made_with_the_first_sample_is_seeded_in_every_worker():
    def draw(index):
        return torch.tensor([float(index), ops.draw()])

    ops = Ops()
    ops.draw = lambda: (ops.lazily(), ops.made.random())[1]
    drawn, loader = epochs(Drawn(draw, 20))
    assert loader.tier == "none"
    assert len({float(row[1]) for row in drawn[0]}) == 20  # workers do not repeat one another
    assert set(distinct_per_sample(drawn)) == {6}


COUNTED = itertools.count()


@pytest.mark.parametrize("kept", ["attribute", "global"])
def test_what_counts_its_draws_is_not_kept(kept):
    """Every hundredth draw is another one: two draws of the first samples look alike."""

    class Counting(Drawn):
        drawn = 0

        def __getitem__(self, index):
            self.drawn += kept == "attribute"
            number = self.drawn if kept == "attribute" else next(COUNTED)
            return torch.tensor([float(index), float(number % 100 == 99)])

    assert "a count of its own calls" in (inspect(Counting(None)).random_because or "")


def test_a_number_that_no_sample_goes_by_is_no_matter():
    class Remembering(Drawn):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            self.last = index
            return torch.tensor([float(index)])

    assert inspect(Remembering(None)).random_because is None


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
    assert "served as it is" in loader.notes[0]
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


def test_a_data_set_that_changes_between_epochs_is_no_longer_served_from_memory():
    """Deterministic, and yet not the same in each epoch: a curriculum, kept where nobody looks for it."""
    stages = [0]
    dataset = Drawn(lambda index: torch.tensor([index, stages[0]]), 16)
    with feed.loader(dataset, 4, num_workers=0) as loader:
        assert int(next(iter(list(loader)))[0, 1]) == 0
        stages[0] = 1
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


def test_a_data_set_that_touches_what_its_list_returns_is_served_as_it_is():
    class Negated(Transformed):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return 1 - image, label

    dataset = Negated(v1.Compose([v1.Resize((12, 12)), v1.RandomHorizontalFlip(), v1.ToTensor()]))
    assert inspect(dataset).split is None
    drawn, loader = epochs(dataset)
    assert "served as it is" in loader.notes[0]
    assert sum(count > 1 for count in distinct_per_sample(drawn)) > 15


def test_two_views_of_one_image_are_not_cut():
    class TwoViews(Transformed):
        def __getitem__(self, index):
            first, _ = super().__getitem__(index)
            second, _ = super().__getitem__(index)
            return first, second

    dataset = TwoViews(v1.Compose([v1.Resize((12, 12)), v1.RandomHorizontalFlip(), v1.ToTensor()]))
    assert inspect(dataset).split is None


def test_a_tier_by_name_is_refused_for_a_random_data_set():
    with pytest.raises(UsageError, match="cannot be kept in ram: sample 0: it draws random numbers"):
        feed.loader(Drawn(lambda i: torch.rand(2)), 4, residency="ram")


def test_the_data_set_is_left_as_it_was():
    transform = v1.Compose([v1.Resize((12, 12)), v1.RandomHorizontalFlip(), v1.ToTensor()])
    dataset = Transformed(transform)
    before = list(transform.transforms)
    epochs(dataset, 1)
    assert type(dataset.transform) is v1.Compose
    assert dataset.transform.transforms == before


def test_deterministic_lists_are_kept_whole():
    dataset = Transformed(v1.Compose([v1.Resize((12, 12)), v1.ToTensor(), v1.Normalize(0.5, 0.5)]))
    drawn, loader = epochs(dataset, 2)
    assert loader.tier == "ram"
    assert torch.equal(drawn[0], torch.stack([dataset[i][0] for i in range(20)]))
    assert torch.equal(drawn[0], drawn[1])


def test_a_profiler_that_is_on_stays_on():
    import cProfile

    profile = cProfile.Profile()
    with profile:
        assert first_reason(lambda index: torch.zeros(index + 1), [0, 1], Generators()) is None
        assert sys.getprofile() is profile


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


@pytest.mark.parametrize(("kind", "workers"), [("random", 0), ("random", 2), ("cut", 0), ("augmented", 0)])
def test_a_sample_drawn_several_times_in_an_epoch_is_augmented_anew_each_time(kind, workers):
    """As a WeightedRandomSampler does with rare classes: copies that are all alike would teach nothing."""
    dataset = {
        "random": Drawn(lambda i: torch.rand(3)),
        "cut": Transformed(v1.Compose([v1.ToTensor(), v1.Lambda(lambda image: image + torch.rand(1))])),
        "augmented": torch.rand(6, 3, 4, 4),
    }[kind]
    noise = [feed.augment.GaussianNoise(0.1)] if kind == "augmented" else None
    with feed.loader(dataset, 4, sampler=[1, 1, 1, 2, 2, 1, 1, 1], augment=noise, num_workers=workers) as loader:
        drawn = torch.cat([_first(batch) for _ in range(2) for batch in loader]).flatten(1)
    assert len(torch.unique(drawn, dim=0)) == len(drawn) == 16


def test_a_generator_seeded_by_the_seed_of_the_worker_is_drawn_anew():
    def draw(index):
        generator = np.random.default_rng(torch.utils.data.get_worker_info().seed + index)
        return torch.tensor([float(index), float(generator.random() < 1e-9)])

    with feed.loader(Drawn(draw), 5, num_workers=1) as loader:
        assert any("draws random numbers" in note for note in loader.notes)
        assert [len(batch) for batch in loader] == [5] * 4
