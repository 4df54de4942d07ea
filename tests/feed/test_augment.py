"""GPU augmentation: right in place and colour, steered by (seed, epoch, index) alone, the same compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulltilt import feed
from fulltilt.errors import UsageError
from fulltilt.feed import random_numbers
from fulltilt.feed.augment import (
    Affine,
    ColourJitter,
    HorizontalFlip,
    Normalise,
    Pipeline,
    RandomCrop,
    RandomResizedCrop,
    SpecAugment,
    VerticalFlip,
)
from fulltilt.feed.augment.geometry import interpolate, pick

from .conftest import Pixels

functional = pytest.importorskip("torchvision.transforms.v2.functional")


def images(batch=6, size=(16, 12)):
    return torch.randint(0, 256, (batch, 3, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def numbers(batch=6):
    return torch.arange(batch) * 1000 + 7


# --------------------------------------------------------------------------- draws


def test_philox_gives_the_published_numbers():
    def words(counter, key):
        return [int(word) for word in random_numbers.philox(tuple(torch.tensor([c]) for c in counter), key)]

    assert words((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert words((ones,) * 4, (ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert words(pi, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@given(
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 2**31),
    indices=st.lists(st.integers(0, 2**40), min_size=1, max_size=5, unique=True),
)
@settings(max_examples=30, deadline=None)
def test_a_sample_draws_the_same_in_any_company(seed, epoch, indices):
    together = random_numbers.uniform(seed, epoch, torch.tensor(indices), 9)
    assert bool((together >= 0).all())
    assert bool((together < 1).all())
    for position, index in enumerate(indices):
        assert torch.equal(random_numbers.uniform(seed, epoch, torch.tensor([index]), 9)[0], together[position])
    assert not torch.equal(random_numbers.uniform(seed, epoch + 1, torch.tensor(indices), 9), together)
    assert not torch.equal(random_numbers.uniform(seed + 1, epoch, torch.tensor(indices), 9), together)


def test_draws_are_uniform():
    u = random_numbers.uniform(1, 2, torch.arange(20_000), 5)
    assert torch.allclose(u.mean(0), torch.full((5,), 0.5), atol=0.01)
    assert torch.allclose(u.var(0), torch.full((5,), 1 / 12), atol=0.003)
    correlation = torch.corrcoef(u.T) - torch.eye(5)
    assert float(correlation.abs().max()) < 0.03


# --------------------------------------------------------------------------- geometry


def run(transforms, batch, mask=None, epoch=0, seed=0, indices=None):
    indices = numbers(len(batch)) if indices is None else indices
    return Pipeline(transforms).apply(batch, mask, seed, torch.tensor(epoch), indices)


@pytest.mark.parametrize(("transform", "dimension"), [(HorizontalFlip(1.0), -1), (VerticalFlip(1.0), -2)])
def test_flips_are_exact(transform, dimension):
    flipped, _ = run([transform], images())
    assert flipped.dtype == torch.uint8
    assert torch.equal(flipped, images().flip(dimension))


def test_a_flip_happens_as_often_as_it_should():
    batch = torch.arange(2, dtype=torch.uint8).view(1, 1, 1, 2).expand(4000, 1, 1, 2).contiguous()
    flipped, _ = run([HorizontalFlip(0.1)], batch, indices=torch.arange(4000))
    assert 0.08 < float((flipped[:, 0, 0, 0] == 1).float().mean()) < 0.12


def test_crops_are_windows_of_the_image_and_reach_its_edges():
    batch = torch.arange(16 * 12, dtype=torch.int64).view(1, 1, 16, 12).expand(500, 1, 16, 12).contiguous()
    cropped, _ = run([RandomCrop(14, 10)], batch, indices=torch.arange(500))
    starts = {int(crop[0, 0, 0]) for crop in cropped}
    assert starts == {row * 12 + column for row in range(3) for column in range(3)}
    for crop in cropped[:20]:
        start = int(crop[0, 0, 0])
        assert torch.equal(crop[0], batch[0, 0, start // 12 :, start % 12 :][:14, :10])
    padded, _ = run([RandomCrop(16, 12, padding=4)], batch, indices=torch.arange(500))
    assert (padded == 0).any()
    with pytest.raises(UsageError, match="does not fit"):
        run([RandomCrop(20, 10)], batch)


def test_image_and_mask_move_together_and_the_mask_keeps_its_values():
    batch = images(32).float() / 255
    mask = (batch[:, 0] > 0.5).long() * 7
    moved, moved_mask = run(
        [
            HorizontalFlip(),
            VerticalFlip(),
            RandomResizedCrop(20, 20, scale=(0.3, 1.0)),
            Affine(20, (0.1, 0.1), (0.8, 1.2)),
        ],
        (mask.float() / 7)[:, None].expand(-1, 3, -1, -1).contiguous(),
        mask,
    )
    assert moved_mask.dtype == torch.int64
    assert set(moved_mask.unique().tolist()) <= {0, 7}
    # Wherever the image is clearly one or the other, the mask agrees.
    sure = (moved[:, 0] - 0.5).abs() > 0.49
    agrees = (moved[:, 0] > 0.5) == (moved_mask == 7)
    assert float(agrees[sure].float().mean()) > 0.999
    assert float(sure.float().mean()) > 0.1


def test_a_chain_of_flips_and_crops_equals_them_one_by_one():
    batch = images(8)
    u = torch.linspace(0.05, 0.95, 8)[:, None]
    flip, crop = HorizontalFlip(0.5), RandomCrop(10, 9)
    size = (16, 12)
    two = torch.cat([u, u.flip(0)], dim=1)
    at_once = pick(batch, flip.matrix(u, size) @ crop.matrix(two, size), (10, 9))
    one_by_one = pick(pick(batch, flip.matrix(u, size), size), crop.matrix(two, size), (10, 9))
    assert torch.equal(at_once, one_by_one)


def test_rotation_is_that_of_torchvision():
    batch = images(1, (17, 17)).float() / 255
    for angle in (90.0, 180.0, 30.0):
        u = torch.tensor([[1.0, 0.5, 0.5, 0.5]])
        ours = interpolate(batch, Affine(degrees=angle).matrix(u, (17, 17)), (17, 17))
        theirs = functional.affine(
            batch,
            angle=angle,
            translate=[0, 0],
            scale=1.0,
            shear=[0.0],
            interpolation=functional.InterpolationMode.BILINEAR,
        )
        assert torch.allclose(ours, theirs, atol=1e-3)


def test_resized_crops_have_the_areas_and_ratios_asked_for():
    transform = RandomResizedCrop(32, 32, scale=(0.25, 0.5), ratio=(0.5, 2.0))
    u = random_numbers.uniform(0, 0, torch.arange(2000), transform.draws)
    matrix = transform.matrix(u, (100, 80))
    width, height = matrix[:, 0, 0] * 32, matrix[:, 1, 1] * 32
    area, ratio = width * height / 8000, width / height
    assert float(area.min()) > 0.24
    assert float(area.max()) < 0.51
    assert float(ratio.min()) > 0.48
    assert float(ratio.max()) < 2.1
    assert float(matrix[:, 0, 2].min()) >= 0
    assert float((matrix[:, 0, 2] + width).max()) <= 80.001
    # A plain resize where the window is the whole image.
    whole = RandomResizedCrop(8, 6, scale=(1.0, 1.0), ratio=(0.75, 0.75))
    batch = images(2).float()
    ours, _ = run([whole], batch)
    theirs = functional.resize(batch, [8, 6], antialias=False)
    assert torch.allclose(ours, theirs, atol=1e-3)


# --------------------------------------------------------------------------- colour and features


def jitter(u, **options):
    batch = images(1).float() / 255
    return batch, ColourJitter(**options).apply(batch, torch.tensor([u]))


@pytest.mark.parametrize("u", [0.0, 0.3, 0.9])
def test_colour_jitter_computes_what_torchvision_computes(u):
    batch, ours = jitter([u, 0, 0, 0], brightness=0.4)
    assert torch.allclose(ours, functional.adjust_brightness(batch, 0.6 + 0.8 * u), atol=1e-5)
    batch, ours = jitter([0, u, 0, 0], contrast=0.4)
    assert torch.allclose(ours, functional.adjust_contrast(batch, 0.6 + 0.8 * u), atol=1e-3)
    batch, ours = jitter([0, 0, u, 0], saturation=0.4)
    assert torch.allclose(ours, functional.adjust_saturation(batch, 0.6 + 0.8 * u), atol=1e-3)
    batch, ours = jitter([0, 0, 0, u], hue=0.2)
    assert torch.allclose(ours, functional.adjust_hue(batch, 0.2 * (2 * u - 1)), atol=1e-4)


def test_normalise_computes_what_torchvision_computes():
    batch = images()
    ours, _ = run([Normalise()], batch)
    theirs = functional.normalize(batch.float() / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_specaugment_blanks_whole_bands():
    windows = torch.ones(200, 40, 16)
    done, mask = Pipeline([SpecAugment(1, 8, 1, 4)]).apply(windows, None, 0, torch.tensor(0), torch.arange(200))
    assert mask is None
    blank_times = (done == 0).all(dim=2)
    blank_features = (done == 0).all(dim=1)
    assert torch.equal(done == 0, blank_times[:, :, None] | blank_features[:, None, :])
    assert int(blank_times.sum(1).max()) == 8
    assert int(blank_features.sum(1).max()) == 4
    for row in blank_times:
        changes = int((row[1:] != row[:-1]).sum())
        assert changes <= 2  # one band
    assert len({tuple(row.tolist()) for row in blank_times}) > 50


# --------------------------------------------------------------------------- steering


ALL = [HorizontalFlip(), RandomResizedCrop(10, 10), ColourJitter(0.3, 0.3, 0.3, 0.1), Normalise()]


def test_results_do_not_depend_on_workers_ranks_batches_or_resumes():
    dataset = Pixels(24)

    def by_index(loader, epoch):
        loader.set_epoch(epoch)
        with loader:
            return {int(label): image for images, labels in loader for image, label in zip(images, labels, strict=True)}

    options = {"shuffle": True, "augment": ALL, "seed": 5}
    reference = by_index(feed.loader(dataset, 24, num_workers=0, **options), 3)
    assert len(reference) == 24
    other = by_index(feed.loader(dataset, 5, num_workers=2, residency="none", **options), 3)
    ranks = {}
    for rank in range(3):
        ranks |= by_index(feed.loader(dataset, 4, num_workers=0, rank=rank, world_size=3, **options), 3)
    for index, image in reference.items():
        assert torch.allclose(image, other[index], atol=1e-6)
        assert torch.allclose(image, ranks[index], atol=1e-6)
    later = by_index(feed.loader(dataset, 24, num_workers=0, **options), 4)
    assert all(not torch.allclose(image, later[index]) for index, image in reference.items())


@pytest.mark.slow
def test_compiled_gives_the_same():
    batch, indices = images(4), numbers(4)
    mask = (batch[:, 0] > 100).to(torch.uint8)
    eager = Pipeline([*ALL], compile=False)
    compiled = Pipeline([*ALL], compile=True)
    for epoch in (0, 1):
        left = eager((batch, mask), 3, epoch, indices)
        right = compiled((batch, mask), 3, epoch, indices)
        assert torch.allclose(left[0], right[0], atol=1e-4)
        assert torch.equal(left[1], right[1])


def test_one_smaller_batch_is_padded_to_the_size_that_is_compiled_already():
    eager, compiled = Pipeline([*ALL], compile=False), Pipeline([*ALL], compile=True)
    sizes: list[int] = []

    def instead(image, *others):
        sizes.append(len(image))
        return compiled.apply(image, *others)

    compiled._compiled = instead
    for samples in (4, 4, 3, 4, 3, 3, 3, 5):
        batch = images(samples)
        left = eager((batch, batch[:, 0]), 3, 0, numbers(samples))
        right = compiled((batch, batch[:, 0]), 3, 0, numbers(samples))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(left, right, strict=True))
    assert sizes == [4, 4, 4, 4, 4, 3, 3, 5]


def test_the_image_and_the_mask_are_found_or_named():
    batch, mask = images(), images()[:, 0]
    named = Pipeline([HorizontalFlip(1.0)], image="x", mask="y")
    done = named({"y": mask, "x": batch, "label": torch.arange(6)}, 0, 0, numbers())
    assert torch.equal(done["x"], batch.flip(-1))
    assert torch.equal(done["y"], mask.flip(-1))
    found = Pipeline([HorizontalFlip(1.0)])((batch, mask, torch.arange(6)), 0, 0, numbers())
    assert torch.equal(found[1], mask.flip(-1))
    with pytest.raises(UsageError, match="may be the mask"):
        Pipeline([HorizontalFlip()])((batch, mask, mask), 0, 0, numbers())
    with pytest.raises(UsageError, match="not a transform"):
        Pipeline([object()])
    with feed.loader(Pixels(4), 2, num_workers=0, augment=lambda batch: batch[1] * 2) as loader:
        assert [b.tolist() for b in loader] == [[0, 2], [4, 6]]


@pytest.mark.slow
def test_compiled_draws_are_the_same_bits() -> None:
    """Products of 64 bits overflowed int64: compiled C++ then drew other numbers than torch."""
    indices = torch.arange(64) * 977
    compiled = torch.compile(lambda seed, epoch, numbers: random_numbers.uniform(seed, epoch, numbers, 23))
    assert torch.equal(compiled(torch.tensor(5), torch.tensor(3), indices), random_numbers.uniform(5, 3, indices, 23))


@pytest.mark.parametrize("seed", [0, 5, 2**32 + 7, 2**63 - 1, 2**63 + 11, -3])
def test_a_seed_steers_the_same_as_a_number_and_as_a_tensor(seed: int) -> None:
    """Compiled code takes tensors, eager code numbers: the draws must not tell them apart."""
    indices = torch.arange(16) * 977
    as_tensor = torch.tensor(random_numbers.as_int64(seed))
    assert torch.equal(
        random_numbers.uniform(as_tensor, torch.tensor(3), indices, 9), random_numbers.uniform(seed, 3, indices, 9)
    )


def test_the_image_is_found_behind_the_labels_and_missed_in_words():
    flips = Pipeline([HorizontalFlip(p=1.0)], compile=False)
    labels, images = torch.arange(2), torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4)
    batch = flips({"label": labels, "image": images}, 0, 0, labels)
    assert torch.equal(batch["image"], images.flip(-1))
    with pytest.raises(UsageError, match="no image to augment, but 0, 1"):
        flips([labels, labels], 0, 0, labels)
    with pytest.raises(UsageError, match=r"no 'picture'.*but 'label', 'image'"):
        Pipeline([HorizontalFlip()], image="picture")({"label": labels, "image": images}, 0, 0, labels)


@pytest.mark.parametrize(
    ("transforms", "shape", "words"),
    [
        ([HorizontalFlip()], (2, 4, 4), r"HorizontalFlip takes a batch of \[batch, channels, height, width\], not of"),
        ([ColourJitter(0.1)], (2, 3, 5, 4, 4), r"ColourJitter takes .* not of \[2, 3, 5, 4, 4\]"),
        ([Normalise()], (2, 1, 4, 4), r"Normalise takes a batch of \[batch, 3, height, width\], not of \[2, 1, 4, 4\]"),
        ([SpecAugment()], (2, 1, 4, 4), r"SpecAugment takes a batch of \[batch, time, features\], not of"),
        ([RandomCrop(8, 8)], (2, 1, 4, 4), "a crop of 8×8 does not fit an image of 4×4"),
    ],
)
def test_a_batch_of_another_shape_is_refused(transforms, shape, words):
    with pytest.raises(UsageError, match=words):
        Pipeline(transforms, compile=False)(torch.rand(shape), 0, 0, numbers(2))


def test_what_fits_or_may_have_been_made_to_fit_is_taken():
    class Coloured:
        draws = 0

        def apply(self, image, u):
            return image.expand(-1, 3, -1, -1)

    for transforms in ([Normalise((0.5,), (0.5,))], [Coloured(), Normalise()]):
        assert len(Pipeline(transforms, compile=False)(torch.rand(2, 1, 4, 4), 0, 0, numbers(2))) == 2
    with pytest.raises(UsageError, match="2 means and 3 deviations"):
        Normalise(mean=(0.0, 0.0))


def test_a_mask_of_another_size_is_refused():
    flips = Pipeline([HorizontalFlip()], image="x", mask="y", compile=False)
    with pytest.raises(UsageError, match=r"the mask should be \[2, 4, 4\] .*, not \[2, 8, 8\]"):
        flips({"x": torch.rand(2, 3, 4, 4), "y": torch.rand(2, 8, 8)}, 0, 0, numbers(2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Affine(degrees=(-10, 10)), r"Affine: degrees is \(-10, 10\); it should be a number from -360 to 360"),
        (lambda: Affine(scale=(0, 0)), r"Affine: scale is \(0, 0\); it should be two numbers from 0.001"),
        (lambda: RandomCrop(4.0, 4), "RandomCrop: height is 4.0; it should be a whole number from 1"),
        (lambda: RandomResizedCrop(4, 4, ratio=1.0), "RandomResizedCrop: ratio is 1.0; it should be two numbers"),
        (lambda: HorizontalFlip(float("nan")), "HorizontalFlip: p is nan"),
        (lambda: ColourJitter(brightness=(0.5, 1.5)), "ColourJitter: brightness is"),
        (lambda: SpecAugment(time_masks=-1), "SpecAugment: time_masks is -1"),
        (lambda: Normalise(0.5, 0.5), "Normalise: mean is 0.5; it should be a tuple of numbers"),
        (lambda: Normalise(std=(0.1, 0.0, 0.1)), r"Normalise: std is \(0.1, 0.0, 0.1\)"),
    ],
)
def test_a_parameter_that_makes_no_image_is_refused_at_once(make, words):
    with pytest.raises(UsageError, match=words):
        make()
