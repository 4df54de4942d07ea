"""A look at a data set leaves nothing behind in it: workers open their own files, iterators do not disturb others."""

from __future__ import annotations

import os
import shelve
import zipfile
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from fulltilt import feed
from fulltilt.errors import DataError, MachineError, UsageError
from fulltilt.feed import worker_pool

from .conftest import Drawn, Pixels

v1 = pytest.importorskip("torchvision.transforms")


class Zipped:
    """Opens its archive at the first sample, as everybody does who has met workers before."""

    def __init__(self, path):
        self.path = path
        self.archive = None
        self.by_name = {}
        self.memo = {}

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.archive is None:
            self.archive = self.by_name["a"] = zipfile.ZipFile(self.path)
            self.late = self.archive.open("0")
        self.memo[index] = torch.tensor(index)
        return torch.frombuffer(bytearray(self.archive.read(str(index))), dtype=torch.uint8)


def test_a_handle_opened_by_the_first_look_is_not_inherited_by_workers(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for number in range(40):
            archive.writestr(str(number), bytes([number]) * 3000)
    dataset = Zipped(tmp_path / "a.zip")
    with feed.loader(dataset, 5, num_workers=2) as loader:
        for _ in range(2):
            assert sorted(int(row[0]) for batch in loader for row in batch) == list(range(40))
            assert dataset.archive is None


def test_where_workers_run_the_data_set_this_process_does_not_before_they_have(cache_dir):
    """Threads of a library that it uses here would be missing in the workers, which wait for them for ever."""
    here = []

    def draw(index):
        here.append(index)  # in a worker it is the worker's list
        return torch.full((3,), index)

    options = {"num_workers": 2, "cache_dir": cache_dir, "cache_key": "v1"}
    for residency in ("ram", "disk", "disk", "none"):
        with feed.loader(Drawn(draw, 20), 4, residency=residency, **options) as loader:
            assert sorted(int(row[0]) for batch in loader for row in batch) == list(range(20))
    with pytest.raises(DataError, match="sample 0 cannot be read"):  # a data set's mistakes are told all the same
        feed.loader(Drawn(lambda index: here.append(index) or index / 0, 20), 4, num_workers=2)
    assert here == []
    with pytest.raises(MachineError, match="ended with exit code 3"):
        feed.loader(Drawn(lambda index: os._exit(3), 20), 4, num_workers=2)


@pytest.mark.parametrize("ahead", [False, True], ids=["cpu", "as on a gpu"])
@pytest.mark.parametrize("residency", ["ram", "none"])
def test_an_iterator_put_aside_goes_on_where_it_was(residency, ahead):
    """As in torch's own tutorial: look at one batch through an iterator, keep it, then train."""
    dataset = Pixels(60)
    with feed.loader(dataset, 4, num_workers=2, residency=residency, shuffle=True) as loader:
        loader._device_batches.copies_ahead = ahead
        aside = iter(loader)
        seen = [next(aside)]
        for _ in range(2):
            assert sorted(int(label) for _, labels in loader for label in labels) == list(range(60))
        seen += list(aside)
        assert sorted(int(label) for _, labels in seen for label in labels) == list(range(60))
        for images, labels in seen:
            assert all(torch.equal(image, dataset[int(label)][0]) for image, label in zip(images, labels, strict=True))
        another = iter(loader)
        if residency == "none":
            next(another)
    if residency == "none":
        with pytest.raises(UsageError, match="closed while this iterator"):
            list(another)


def test_batches_look_as_a_dataloader_makes_them():
    def draw(index):
        return (
            torch.full((2,), index),
            {"flag": index > 2, "at": (np.float32(index), np.arange(index, index + 3)[::-1])},
            np.full((2,), index, dtype=">f4"),
        )

    expected = next(iter(DataLoader(Drawn(lambda i: (*draw(i)[:1], {"flag": i > 2}), 6), 3)))
    with feed.loader(Drawn(draw, 6), 3, num_workers=0) as loader:
        batch = next(iter(loader))
    assert type(batch) is type(expected) is list
    assert type(batch[1]["at"]) is list
    assert torch.equal(batch[1]["flag"], expected[1]["flag"])
    assert batch[1]["at"][1].tolist() == [[2, 1, 0], [3, 2, 1], [4, 3, 2]]
    assert batch[2].tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize(
    "mapping",
    [OrderedDict, lambda items: defaultdict(list, items)],
    ids=["OrderedDict", "defaultdict"],  # a lambda's address differs between processes
)
def test_a_mapping_stays_of_its_type(mapping):
    dataset = Drawn(lambda i: mapping({"y": i, "x": torch.zeros(3, 4, 4)}), 6)
    expected = next(iter(DataLoader(dataset, 3)))
    flips = [feed.augment.HorizontalFlip()]
    with feed.loader(dataset, 3, augment=flips, num_workers=0) as loader:
        batch = next(iter(loader))
    assert type(batch) is type(expected)
    assert list(batch) == list(expected)
    assert getattr(batch, "default_factory", None) is getattr(expected, "default_factory", None)


def test_the_order_of_keys_and_the_kind_of_a_number_are_no_part_of_a_shape():
    def draw(index):
        items = {"x": torch.full((2,), index), "y": np.int64(index) if index % 2 else index}
        return items if index % 3 else dict(reversed(items.items()))

    with feed.loader(Drawn(draw, 12), 4, num_workers=0) as loader:
        for _ in range(2):
            assert torch.cat([batch["y"] for batch in loader]).tolist() == list(range(12))
            assert torch.cat([batch["x"][:, 0] for batch in loader]).tolist() == list(range(12))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tensor_data_set_is_read_by_the_batch(workers):
    x, y = torch.randn(23, 3), torch.arange(23)
    with feed.loader(TensorDataset(x, y), 5, shuffle=True, num_workers=workers) as loader:
        for _ in range(2):
            for rows, numbers in loader:
                assert torch.equal(rows, x[numbers])


def test_a_dataloader_call_works_as_it_stands_and_mistakes_are_told():
    options = {"pin_memory": True, "persistent_workers": True, "prefetch_factor": 4, "timeout": 0}
    with feed.loader(Pixels(8), batch_size=4, shuffle=True, num_workers=2, **options) as loader:
        assert len(list(loader)) == 2

    class Stream(IterableDataset):
        def __len__(self):
            return 3

        def __iter__(self):
            return iter(range(3))

    for given, words in (
        ((Pixels(8), 4, {"worker_init_fn": print}), "has no worker_init_fn"),
        ((Pixels(8), 4, {"num_workers": -1}), "num_workers is -1"),
        ((Pixels(8), None, {}), "batch_size is None"),
        ((Pixels(8), 2.5, {}), "batch_size is 2.5"),
        ((Pixels(8), 4, {"device": "gpu"}), "device 'gpu' is unknown"),
        ((Pixels(8), 4, {"batch_sampler": [[1]]}), "has no batch_sampler"),
        ((Stream(), 4, {}), "keep the DataLoader for a stream"),
    ):
        dataset, batch_size, more = given
        with pytest.raises(UsageError, match=words):
            feed.loader(dataset, batch_size, **more)
    with (
        pytest.raises(UsageError, match="gives one sample after the other"),
        feed.loader(Pixels(8), sampler=[[1, 2]]) as loader,
    ):
        list(loader)


def test_a_data_set_may_ask_which_worker_it_is_in():
    dataset = Drawn(lambda i: torch.tensor([i, get_worker_info().num_workers, get_worker_info().id < 2]), 12)
    with feed.loader(dataset, 4, num_workers=2) as loader:
        for _ in range(3):
            assert torch.cat(list(loader)).tolist() == [[i, 2, 1] for i in range(12)]
        assert loader.tier == "ram"  # and the samples compared with it in this process are the same
    assert get_worker_info() is None


def test_a_convolution_in_a_worker_does_not_wait_for_threads_of_this_process(monkeypatch):
    """Arm's library of them does: a DataLoader with workers waits for ever there."""
    monkeypatch.setattr(worker_pool, "PATIENCE_S", 20.0)
    torch.ones(1_000_000).add(1)  # has torch's threads started
    kernel = torch.ones(3, 1, 3, 3)
    dataset = Drawn(lambda i: torch.nn.functional.conv2d(torch.full((1, 3, 9, 9), i + 0.5), kernel, groups=3), 8)
    with feed.loader(dataset, 4, num_workers=1) as loader:
        for _ in range(3):
            assert [tuple(batch.shape) for batch in loader] == [(4, 1, 3, 7, 7)] * 2
        assert loader.tier == "ram"
    assert torch.backends.mkldnn.enabled == torch.backends.mkldnn.is_available()


class Shelved:
    """Opened at the first sample; its file is a mapping whose values are read when they are asked for."""

    def __init__(self, path, opens):
        self.path, self.opens, self.file = path, opens, None

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if self.file is None:
            self.file = self.opens(self.path)
        return torch.as_tensor(self.file[f"{index}"][()] if self.opens is not shelve.open else self.file[f"{index}"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_is_a_mapping_is_not_walked_through(tmp_path, workers):
    """Each look into an h5py.File makes new objects: they were taken for another content in every epoch."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for index in range(20):
            file[f"{index}"] = [float(index)]
    dataset = Shelved(tmp_path / "a.h5", h5py.File)
    if workers == 0:
        dataset[0]  # as a look at a sample in a script leaves it
    with feed.loader(dataset, 5, num_workers=workers) as loader:
        for _ in range(4):
            assert torch.cat(list(loader)).flatten().tolist() == list(range(20))
        assert loader.tier == "ram"
    if dataset.file is not None:
        dataset.file.close()
