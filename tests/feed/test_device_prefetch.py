"""The path of a GPU, run on the CPU: feeding thread and device store do not need CUDA to be right."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from fulltilt import feed
from fulltilt.errors import DataError
from fulltilt.feed import sample_cache
from fulltilt.feed.sample_layout import layout_of
from fulltilt.feed.sample_store import Store
from fulltilt.train.data_source import to_device

from .conftest import Drawn, Pixels

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Loaders made with this believe in a device with a tier of its own."""
    room = dict.fromkeys(("vram", "pinned", "ram", "disk"), 1 << 30)
    monkeypatch.setattr(sample_cache, "measure_free_bytes", lambda *_, **__: room)

    def make(*args, **options):
        loader = feed.loader(*args, **options)
        loader._device_batches.copies_ahead = True
        return loader

    return make


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fulltilt-feed")]


@pytest.mark.parametrize("tier", ["vram", "pinned", "ram", "disk", "none"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_tier_serves_the_data_set_through_the_thread(as_on_a_gpu, tier, workers, cache_dir):
    dataset = Pixels(23)
    with as_on_a_gpu(dataset, 5, shuffle=True, residency=tier, num_workers=workers, cache_dir=cache_dir) as loader:
        for _ in range(3):
            kept = list(loader)
            labels = []
            for images, numbers in kept:
                labels += numbers.tolist()
                assert images.is_contiguous()
                assert numbers.is_contiguous()
                for image, number in zip(images, numbers, strict=True):
                    assert torch.equal(image, dataset[int(number)][0])
            assert sorted(labels) == list(range(23))
        assert loader.tier == tier
    assert not threads()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tier", ["pinned", "ram", "disk", "none"])
@pytest.mark.parametrize("passes_put_aside", [1, 3])
@pytest.mark.slow
def test_an_iterator_that_is_put_aside_does_not_hold_up_the_next(as_on_a_gpu, tier, passes_put_aside, cache_dir):
    dataset = Pixels(60)
    with as_on_a_gpu(dataset, 4, shuffle=True, residency=tier, num_workers=2, cache_dir=cache_dir) as loader:
        for _ in range(2):  # while samples arrive, and when they are kept
            aside = [iter(loader) for _ in range(passes_put_aside)]
            for pass_ in aside:
                next(pass_)
            time.sleep(0.2)  # each reads ahead as far as it can
            assert sorted(number for _, numbers in loader for number in numbers.tolist()) == list(range(60))
            for pass_ in aside:
                assert len(list(pass_)) == 14


def test_vram_is_taken_only_after_the_model_has_shown_what_it_needs(as_on_a_gpu, monkeypatch):
    asked = []
    room = sample_cache.measure_free_bytes()
    monkeypatch.setattr(
        sample_cache, "measure_free_bytes", lambda *_, **options: asked.append(options["model_has_run"]) or room
    )
    with as_on_a_gpu(Pixels(40), 4, num_workers=0) as loader:
        loader._cache.waits_for_model = True
        tiers = [loader.tier for _ in loader]
        assert tiers[:3] == ["none"] * 3
        assert tiers[4:] == ["vram"] * 6
        assert asked[-1] is True
        list(loader)  # reads the batches before it
        assert any("all 40 samples are kept (vram)" in note for note in loader.notes)
        assert bool(loader._cache.store.present.all())


@pytest.mark.parametrize("workers", [0, 2])
def test_what_drop_last_left_out_is_read_before_the_next_pass_begins(as_on_a_gpu, monkeypatch, workers):
    """Else the whole of that pass would go through the thread that assembles batches, for a few samples' sake."""
    dataset = Pixels(43)
    with as_on_a_gpu(dataset, 4, shuffle=True, drop_last=True, num_workers=workers, residency="vram") as loader:
        assert len(list(loader)) == 10
        assert int(loader._cache.store.present.sum()) == 40
        resident = []
        serve = loader._device_batches._resident
        monkeypatch.setattr(loader._device_batches, "_resident", lambda *given: resident.append(True) or serve(*given))
        for _ in range(3):
            for images, numbers in loader:
                for image, number in zip(images, numbers, strict=True):
                    assert torch.equal(image, dataset[int(number)][0])
        assert len(resident) == 3


def test_leaving_early_ends_the_thread_and_frees_every_slot(as_on_a_gpu):
    dataset = Pixels(60)
    with as_on_a_gpu(dataset, 4, shuffle=True, residency="none", num_workers=2) as loader:
        for _ in range(4):
            for number, _batch in enumerate(loader):
                if number == 1:
                    break
            assert not threads()
        assert sum(len(labels) for _, labels in loader) == 60


def test_an_error_in_the_thread_reaches_the_training_loop(as_on_a_gpu):
    def draw(index):
        if index == 11:
            raise OSError("torn")
        return torch.zeros(2)

    with (
        as_on_a_gpu(Drawn(draw, 20), 4, num_workers=2, checks=2) as loader,
        pytest.raises(DataError, match="sample 11"),
    ):
        list(loader)
    assert not threads()


def test_skipped_samples_are_left_out_of_a_device_store(as_on_a_gpu):
    def draw(index):
        if index == 5:
            raise OSError("torn")
        return torch.full((3,), index)

    with as_on_a_gpu(Drawn(draw, 20), 4, num_workers=2, checks=2, on_bad_sample="skip", residency="vram") as loader:
        for _ in range(3):
            assert sorted(int(row[0]) for batch in loader for row in batch) == [i for i in range(20) if i != 5]


def test_a_device_store_gathers_every_dtype():
    sample = {
        "image": torch.zeros(3, 5, 7, dtype=torch.uint8),
        "odd": torch.zeros(3, dtype=torch.int16),
        "label": 3,
        "half": torch.zeros(4, dtype=torch.bfloat16),
        "flag": True,
        "deep": torch.zeros(3, dtype=torch.uint16),  # a picture of 16 bits, which torch can store but not index
        "wave": torch.zeros(2, dtype=torch.complex64),
        "nothing": torch.zeros(0, 4),
    }
    layout = layout_of(sample)
    store = Store(torch.empty(9, layout.row_bytes, dtype=torch.uint8), torch.zeros(9, dtype=torch.bool), on_device=True)
    rows = torch.zeros(9, layout.row_bytes, dtype=torch.uint8)
    samples = []
    for number in range(9):
        samples.append(
            {
                "image": torch.full((3, 5, 7), number, dtype=torch.uint8),
                "odd": torch.full((3,), -number, dtype=torch.int16),
                "label": number * 1000,
                "half": torch.full((4,), number / 2, dtype=torch.bfloat16),
                "flag": number % 2 == 0,
                "deep": torch.full((3,), 60_000 + number, dtype=torch.uint16),
                "wave": torch.full((2,), number * 1j, dtype=torch.complex64),
                "nothing": torch.zeros(0, 4),
            }
        )
        layout.pack(samples[-1], rows[number])
    store.write(torch.arange(9), rows)
    picks = torch.tensor([7, 0, 7])
    batch = layout.build(layout.split(store.gather(picks)))
    for row, number in enumerate(picks.tolist()):
        for key, value in samples[number].items():
            assert torch.equal(batch[key][row], torch.as_tensor(value))


class Named(list):
    """A list that is made otherwise than a list is."""

    def __init__(self, items, name):
        super().__init__(items)
        self.name = name


class Graph:
    """A batch of a class of its own, such as those of graph libraries."""

    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device, non_blocking=False):
        return Graph(self.nodes.to(device, non_blocking=non_blocking))


def test_what_a_collate_fn_makes_is_moved_whatever_it_is():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device({"packed": packed, "named": Named([torch.ones(1)], "a"), "graph": Graph(torch.ones(2))}, META)
    assert moved["packed"].data.device == META
    assert moved["packed"].batch_sizes.device == CPU  # torch insists on it
    assert [part.device for part in moved["named"]] == [META]
    assert moved["graph"].nodes.device == META
