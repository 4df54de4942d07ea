"""A file that the data set has open before there are workers is refused: forked workers would share its position."""

from __future__ import annotations

import os
import sqlite3
import zipfile
from pathlib import Path

import pytest
import torch

from fulltilt import feed
from fulltilt.errors import UsageError
from fulltilt.feed.dataset_objects import refuse_shared_handle

SAMPLES, NUMBERS = 400, 64


class Opened:
    """Numbers in a file that is opened where the data set is made, as many are."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file.seek(index * NUMBERS * 8)
        return torch.frombuffer(bytearray(self.file.read(NUMBERS * 8)), dtype=torch.int64)


class OpenedInEach(Opened):
    """Opens its file anew wherever it finds itself in another process."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path, self.process = path, os.getpid()

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.process != os.getpid():
            self.file, self.process = self.path.open("rb"), os.getpid()
        return super().__getitem__(index)


class Archived:
    def __init__(self, path: Path) -> None:
        self.path, self.archive = path, None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.archive = self.archive or zipfile.ZipFile(self.path)
        return torch.frombuffer(bytearray(self.archive.read(str(index))), dtype=torch.int64)


@pytest.fixture
def numbers() -> torch.Tensor:
    return torch.arange(SAMPLES * NUMBERS).view(SAMPLES, NUMBERS)


@pytest.fixture
def file(tmp_path, numbers):
    path = tmp_path / "numbers.bin"
    path.write_bytes(numbers.numpy().tobytes())
    return path


@pytest.mark.parametrize("workers", [None, 2])
def test_workers_do_not_share_an_open_file(file, numbers, workers):
    dataset = Opened(file)
    with pytest.raises(
        UsageError, match=r"holds an open BufferedReader of .*numbers\.bin that \d+ workers would share"
    ):
        feed.loader(dataset, batch_size=16, num_workers=workers)
    with feed.loader(dataset, batch_size=16, num_workers=0) as loader:
        for _ in range(2):
            assert torch.equal(torch.cat(list(loader)), numbers)
    dataset.file.close()


def test_nor_an_archive_that_was_read_from_before(tmp_path, numbers):
    with zipfile.ZipFile(tmp_path / "numbers.zip", "w") as archive:
        for index, row in enumerate(numbers):
            archive.writestr(str(index), row.numpy().tobytes())
    dataset = Archived(tmp_path / "numbers.zip")
    with feed.loader(dataset, batch_size=16, num_workers=2) as loader:
        assert torch.equal(torch.cat(list(loader)), numbers)
    dataset[0]
    with pytest.raises(UsageError, match="holds an open ZipFile of"):
        feed.loader(dataset, batch_size=16, num_workers=2)
    dataset.archive.close()


def test_code_that_opens_its_file_in_each_process_keeps_its_workers(file, numbers):
    dataset = OpenedInEach(file)
    with feed.loader(dataset, batch_size=16, num_workers=2) as loader:
        assert loader.workers == 2
        assert torch.equal(torch.cat(list(loader)), numbers)
    dataset.file.close()


class Held:
    def __init__(self, held: object) -> None:
        self.held = held

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


def test_a_closed_connection_is_no_handle() -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.raises(UsageError, match="open Connection"):
        refuse_shared_handle(Held(connection), 2)
    connection.close()
    refuse_shared_handle(Held(connection), 2)


def test_whether_a_netcdf_file_is_open_is_asked_by_a_call() -> None:
    dataset = type("Dataset", (), {"__module__": "netCDF4", "isopen": lambda self: self.open, "open": True})()
    with pytest.raises(UsageError, match="open Dataset"):
        refuse_shared_handle(Held(dataset), 2)
    dataset.open = False
    refuse_shared_handle(Held(dataset), 2)


def test_features_made_in_inference_mode_are_served() -> None:
    with torch.inference_mode():
        held = torch.ones(3)
    with feed.loader(Held(held), 4, num_workers=0, device="cpu") as loader:
        assert [batch.flatten().tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_pass_begun_in_inference_mode_goes_on_outside_of_it() -> None:
    with feed.loader(Held(None), 2, num_workers=0, device="cpu", residency="ram") as loader:
        with torch.inference_mode():
            passing = iter(loader)
            next(passing)
        assert len(list(passing)) == 3
