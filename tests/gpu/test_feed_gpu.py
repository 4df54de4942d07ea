"""The feed on a real GPU: every tier serves the data set, nothing races, nothing waits for the device."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fulltilt import feed
from fulltilt.errors import DoesNotFit
from fulltilt.feed import random_numbers
from fulltilt.feed.augment import (
    Affine,
    ColourJitter,
    HorizontalFlip,
    Normalise,
    Pipeline,
    RandomResizedCrop,
    SpecAugment,
)
from fulltilt.train import Job, TrainSettings, train
from fulltilt.train.progress import TrainingScreen

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


class Pixels:
    """Deterministic images with a mask and a label, made from the index alone."""

    def __init__(self, samples=203, size=64):
        self.samples = samples
        self.size = size

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randint(0, 256, (3, self.size, self.size), generator=generator, dtype=torch.uint8)
        return pixels, pixels[:1].clone(), index


@pytest.fixture(scope="module")
def reference():
    dataset = Pixels()
    return torch.stack([dataset[index][0] for index in range(len(dataset))]).to(CUDA)


@pytest.mark.parametrize("tier", ["vram", "pinned", "ram", "disk", "none"])
def test_every_tier_serves_the_data_set(tier, tmp_path, reference):
    with feed.loader(Pixels(), 16, shuffle=True, residency=tier, num_workers=4, cache_dir=tmp_path) as loader:
        for _ in range(4):
            seen = []
            for images, masks, labels in loader:
                assert images.device == CUDA
                assert torch.equal(images, reference[labels])
                assert torch.equal(masks, images[:, :1])
                seen += labels.tolist()
            assert sorted(seen) == list(range(203))
        assert loader.tier == tier


@pytest.mark.parametrize("tier", ["vram", "pinned", "ram", "none"])
def test_no_buffer_is_overwritten_while_the_gpu_still_reads_it(tier, reference):
    """The GPU lags far behind the host, so that any missing event shows as wrong pixels."""
    slow = torch.randn(4096, 4096, device=CUDA)
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    with feed.loader(Pixels(), 16, shuffle=True, residency=tier, num_workers=4) as loader:
        for _ in range(3):
            for images, _, labels in loader:
                for _ in range(6):
                    slow = (slow @ slow).clamp(-1, 1)
                wrong += (images != reference[labels]).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("tier", ["vram", "ram", "none"])
def test_two_iterators_at_once_have_buffers_of_their_own(tier, reference):
    slow = torch.randn(4096, 4096, device=CUDA)
    with feed.loader(Pixels(), 16, shuffle=True, residency=tier, num_workers=2) as loader:
        for _ in range(2):
            seen = []
            for pair in zip(loader, loader, strict=True):
                slow = (slow @ slow).clamp(-1, 1)
                for images, _, labels in pair:
                    assert torch.equal(images, reference[labels])
                    seen += labels.tolist()
            assert sorted(seen) == sorted([*range(203), *range(203)])


def test_memory_that_was_pinned_before_is_not_copied_from(reference):
    """A loader that is closed and still referred to must not leave its addresses in the driver's books.

    The next one is mapped at the same addresses; the driver would copy from the pages of the one before it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="could not pin")
        kept = []
        for tier in ("ram", "pinned", "none", "ram", "pinned"):
            with feed.loader(Pixels(), 16, shuffle=True, residency=tier, num_workers=2) as loader:
                for _ in range(2):
                    for images, _, labels in loader:
                        assert torch.equal(images, reference[labels])
            kept.append(loader)


def test_without_workers_the_users_random_numbers_are_left_alone():
    def numbers(batches):
        torch.manual_seed(3)
        drawn = []
        for _ in batches:
            drawn += [torch.rand(1).item() for _ in range(200)]
        return drawn

    with feed.loader(Pixels(64), 16, residency="ram", num_workers=0) as loader:
        assert numbers(loader) == numbers(range(4))
        assert not any("random" in note for note in loader.notes)


def test_a_training_on_another_stream_is_right_too(reference):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), feed.loader(Pixels(), 16, residency="none", num_workers=2) as loader:
        for images, _, labels in loader:
            assert torch.equal(images, reference[labels])


def test_a_resident_epoch_never_waits_for_the_gpu():
    augment = Pipeline([HorizontalFlip(), RandomResizedCrop(48, 48), ColourJitter(0.2, 0.2, 0.2, 0.05), Normalise()])
    with feed.loader(
        Pixels(), 16, shuffle=True, residency="vram", num_workers=4, augment=augment, drop_last=True
    ) as loader:
        list(loader)
        list(loader)
        batches = iter(loader)
        next(batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                next(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        batches.close()


def test_weights_after_fifty_steps_equal_those_of_a_plain_dataloader():
    torch.use_deterministic_algorithms(True, warn_only=True)
    dataset = Pixels(80, 16)

    def train(batches):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 80)).to(CUDA)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for images, _, labels in batches:
            loss = nn.functional.cross_entropy(model(images.to(CUDA).float() / 255), labels.to(CUDA))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    order = torch.randperm(80).tolist()
    plain = train(batch for _ in range(5) for batch in DataLoader(dataset, 8, sampler=order))
    for tier in ("vram", "pinned", "none"):
        with feed.loader(dataset, 8, sampler=order, residency=tier, num_workers=2) as loader:
            assert torch.equal(train(batch for _ in range(5) for batch in loader), plain)
    torch.use_deterministic_algorithms(False)


def test_the_model_keeps_its_memory():
    """A data set that would fit beside an empty GPU, but not beside what the model reserved."""
    free, total = torch.cuda.mem_get_info()
    dataset = Pixels(64, 64)
    with feed.loader(dataset, 8, num_workers=2, reserve_bytes=free + total) as loader:
        list(loader)
        assert loader.tier == "pinned"
    with (
        pytest.raises(DoesNotFit, match="vram has room for"),
        feed.loader(dataset, 8, num_workers=2, residency="vram", reserve_bytes=free + total) as loader,
    ):
        list(loader)
    with feed.loader(dataset, 4, num_workers=2) as loader:
        tiers = [loader.tier for _ in loader]
        assert tiers[:3] == ["none"] * 3  # decided once the model has trained three steps
        assert tiers[-1] == "vram"


def test_memory_is_given_back():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for tier in ("vram", "none"):
        with feed.loader(Pixels(), 16, residency=tier, num_workers=2) as loader:
            list(loader)
        del loader
    assert torch.cuda.memory_allocated() <= before + 1024**2


def test_draws_and_augmentation_are_those_of_the_cpu():
    indices = torch.arange(64) * 977
    assert torch.equal(
        random_numbers.uniform(5, 3, indices, 23), random_numbers.uniform(5, 3, indices.to(CUDA), 23).cpu()
    )
    batch = torch.randint(0, 256, (64, 3, 40, 40), dtype=torch.uint8)
    mask = (batch[:, 0] > 128).to(torch.uint8)
    transforms = [
        HorizontalFlip(),
        Affine(15, (0.1, 0.1), (0.9, 1.1)),
        ColourJitter(0.2, 0.2, 0.2, 0.05),
    ]
    for seed in (7, 8):  # a second number is where a compiler begins to take it for a variable
        on_cpu = Pipeline(transforms, compile=False)((batch, mask), seed, 2, indices)
        for compiled in (False, True):
            on_gpu = Pipeline(transforms, compile=compiled)((batch.to(CUDA), mask.to(CUDA)), seed, 2, indices.to(CUDA))
            assert float((on_gpu[0].cpu() - on_cpu[0]).abs().mean()) < 1e-3
            assert float((on_gpu[1].cpu() != on_cpu[1]).float().mean()) < 1e-3  # a rounding may fall otherwise


def test_hdf5_resident_and_streamed(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.h5"
    values = torch.arange(20_000)
    with h5py.File(path, "w") as file:
        x = values[:, None, None].expand(-1, 8, 4).float().numpy()
        file.create_dataset("x", data=x, chunks=(256, 8, 4))
        file.create_dataset("y", data=values.numpy())
    slow = torch.randn(2048, 2048, device=CUDA)
    for tier in ("vram", "none"):
        with feed.hdf5(path, ["x", "y"], 512, residency=tier, num_workers=4, mixing_rows=6000) as loader:
            for _ in range(3):
                seen, wrong = [], torch.zeros((), dtype=torch.int64, device=CUDA)
                for x, y in loader:
                    slow = (slow @ slow).clamp(-1, 1)  # the GPU lags behind: memory given back too early would show
                    wrong += (x != y[:, None, None]).sum()
                    seen.append(y)
                assert x.device == CUDA
                assert int(wrong) == 0
                assert torch.equal(torch.cat(seen).sort().values.cpu(), values)
    with feed.hdf5(path, ["x"], 512, residency="vram", augment=SpecAugment(1, 3, 1, 2), num_workers=2) as loader:
        assert any(bool((x == 0).any()) for x in loader)


def test_text_is_assembled_on_the_device():
    sequences = [[number + 1] * (1 + number % 37) for number in range(3000)]
    loader = feed.text(sequences, labels=list(range(3000)), batch_size=64)
    for batch in loader:
        assert batch["input_ids"].device == CUDA
        assert torch.equal(batch["input_ids"].max(dim=1).values, batch["labels"] + 1)
        assert torch.equal(batch["attention_mask"].sum(1), 1 + batch["labels"] % 37)
    assert loader.padding_waste < 0.3


@pytest.mark.parametrize("residency", ["vram", "pinned", "ram", "disk"])
def test_the_engine_trains_the_same_from_every_tier(residency, tmp_path, monkeypatch):
    monkeypatch.setenv("FULLTILT_CACHE_DIR", str(tmp_path / "cache"))
    chains = []
    for name in ("none", residency):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 32), nn.ReLU(), nn.Linear(32, 8))
        job = Job(
            model=model,
            loss=lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[2] % 8),
            data=Pixels(70, 16),
            eval_data=Pixels(30, 16),
            augment=[HorizontalFlip(), ColourJitter(0.2), Normalise()],
            eval_augment=[Normalise()],
        )
        settings = TrainSettings(
            epochs=3, batch_size=16, workers=2, residency=name, precision="fp32", deterministic=True, record=False
        )
        train(
            job, settings, tmp_path / name, screen=TrainingScreen(tmp_path / name, stream=io.StringIO(), sampled=False)
        )
        chains.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*chains)
