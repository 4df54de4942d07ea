"""Images that are cut short or no images at all, HDF5 files that are damaged or opened too early."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy
import pytest
import torch
from PIL import Image

from fulltilt import feed
from fulltilt.errors import DataError, UsageError
from fulltilt.train.config import TrainSettings
from fulltilt.train.exit_code import exit_code_of
from fulltilt.train.job import Job
from fulltilt.train.loop import train
from fulltilt.train.progress import TrainingScreen

COUNT = 40


class Images:
    """JPEG files as most data sets read them."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = numpy.asarray(Image.open(self.paths[index]).convert("RGB"))
        return torch.from_numpy(pixels.copy()).float() / 255, index % 2


def images(folder: Path, spoilt: dict[int, str]) -> Images:
    folder.mkdir()
    for index in range(COUNT):
        noise = numpy.random.default_rng(index).integers(0, 255, (8, 8, 3), dtype=numpy.uint8)
        path = folder / f"{index:03d}.jpg"
        Image.fromarray(noise).save(path)
        if index in spoilt:
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2] if spoilt[index] == "cut" else b"not an image")
    return Images(folder)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.layer = torch.nn.Linear(8 * 8 * 3, 2)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        self.seen += len(pixels) if self.training else 0
        return self.layer(pixels.flatten(1))


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def run(out: Path, data: Any, *, net: Net | None = None, **settings: Any) -> tuple[int, str, str]:
    """Exit code, what went to the screen, and what the user was told at the end."""
    stream, errors = io.StringIO(), io.StringIO()
    chosen = TrainSettings(**{"device": "cpu", "batch_size": 8, "record": False, **settings})
    job = Job(model=net or Net(), loss=loss, data=data)
    screen = TrainingScreen(out, stream=stream, sampled=False)
    code = exit_code_of(lambda: train(job, chosen, out, screen=screen), out, errors)
    return code, stream.getvalue(), errors.getvalue()


WAYS = [("none", 0), ("none", 2), ("auto", 0), ("auto", 2)]


@pytest.mark.parametrize(("residency", "workers"), WAYS)
def test_a_bad_image_is_named_and_stops_the_run(residency: str, workers: int, tmp_path: Path) -> None:
    """Seen to fail: without the `except` in `SeededSamples.__getitem__` the exit code is 1 and no file is named (with
    residency none; the feed has its own, `SampleReader`)."""
    data = images(tmp_path / "images", {23: "cut"})
    code, _, told = run(tmp_path / "out", data, residency=residency, workers=workers)
    assert code == 4
    assert told.startswith(f"fulltilt: sample 23 ({data.paths[23]}) cannot be read: OSError: ")
    assert "on_bad_sample" in told
    assert len(told.splitlines()) <= 3
    assert "Traceback" not in told
    assert "test_data.py" in (tmp_path / "out" / "error.log").read_text(), "the reader's own lines are in the log"


@pytest.mark.parametrize(("residency", "workers"), WAYS)
def test_bad_images_are_skipped_and_named_once(residency: str, workers: int, tmp_path: Path) -> None:
    """Fails where `MapSource` does not look into a `PartialBatch`: the engine meets a batch that is none."""
    data = images(tmp_path / "images", {3: "cut", 23: "text"})
    net = Net()
    settings = {"on_bad_sample": "skip", "max_bad_share": 0.05, "epochs": 2}
    code, shown, told = run(tmp_path / "out", data, net=net, residency=residency, workers=workers, **settings)
    assert code == 0, told
    for index in (3, 23):
        assert shown.count(f"warning: skipped sample {index} ({data.paths[index]}): ") == 1
    assert net.seen == 2 * (COUNT - 2)


@pytest.mark.parametrize("residency", ["none", "auto"])
def test_too_many_bad_images_stop_the_run(residency: str, tmp_path: Path) -> None:
    """Seen to fail: without the comparison with ``max_share`` in `BadSamples.note` the run ends with code 0."""
    data = images(tmp_path / "images", dict.fromkeys(range(0, COUNT, 8), "cut"))
    code, _, told = run(tmp_path / "out", data, residency=residency, on_bad_sample="skip", max_bad_share=0.05)
    assert code == 4
    assert "3 of 40 samples are bad, more than the 5.0% allowed" in told
    assert str(data.paths[0]) in told or str(data.paths[8]) in told


def test_a_batch_of_nothing_but_bad_images_is_left_out(tmp_path: Path) -> None:
    data = images(tmp_path / "images", {3: "cut", 23: "cut"})
    net = Net()
    settings = {"on_bad_sample": "skip", "max_bad_share": 0.1, "batch_size": 1, "accumulation": 4}
    assert run(tmp_path / "out", data, net=net, residency="none", **settings)[0] == 0
    assert net.seen == COUNT - 2


# --------------------------------------------------------------------------- HDF5


def hdf5_file(path: Path, rows: int = 64) -> Path:
    with h5py.File(path, "w") as file:
        numbers = numpy.random.default_rng(0)
        file.create_dataset("pixels", data=numbers.random((rows, 192), dtype=numpy.float32), chunks=(8, 192))
        file.create_dataset("label", data=numbers.integers(0, 2, rows), chunks=(8,))
    return path


def test_a_cut_hdf5_file_is_named_with_its_key(tmp_path: Path) -> None:
    """Seen to fail: without the `except OSError` of feed/hdf5_files.py the exit code is 1 and h5py's own words are all
    there is."""
    path = hdf5_file(tmp_path / "rows.h5")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    out, errors = tmp_path / "out", io.StringIO()

    def body() -> None:
        with feed.hdf5(path, ["pixels", "label"], 8, device="cpu", num_workers=0) as batches:
            train(Job(model=Net(), loss=loss, data=batches), TrainSettings(device="cpu"), out)

    assert exit_code_of(body, out, errors) == 4
    assert str(path) in errors.getvalue()
    assert "Traceback" not in errors.getvalue()


class EarlyOpened:
    """The file is opened in the constructor, before any worker is forked."""

    def __init__(self, path: Path, *, key: bool = False) -> None:
        self.files = {"train": h5py.File(path)["pixels"] if key else h5py.File(path)}

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.files["train"]["pixels"][index]), 0


class LateOpened(EarlyOpened):
    """Opened once in each process."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, {}

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not self.files:
            self.files["train"] = h5py.File(self.path)
        return super().__getitem__(index)


@pytest.mark.parametrize("residency", ["none", "auto"])
def test_a_handle_opened_before_the_fork_is_refused(residency: str, tmp_path: Path) -> None:
    """Seen to fail: without `refuse_shared_handle` four workers read through one handle, and the run ends with code 0
    whatever they have read."""
    path = hdf5_file(tmp_path / "rows.h5")
    code, _, told = run(tmp_path / "out", EarlyOpened(path), residency=residency, workers=4)
    assert code == 2
    assert f"the data set EarlyOpened holds an open File of {path} that 4 workers would share" in told
    assert "Open it in __getitem__" in told
    with pytest.raises(UsageError, match=r"rows\.h5, key /pixels"):
        train(
            Job(model=Net(), loss=loss, data=torch.utils.data.Subset(EarlyOpened(path, key=True), range(8))),  # type: ignore[arg-type]
            TrainSettings(device="cpu", workers=4),
            tmp_path / "other",
            screen=TrainingScreen(tmp_path, speaks=False),
        )


class Streamed:
    """Rows of 192 float32 in a plain file, opened in the constructor."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.file.seek(index * 768)
        return torch.frombuffer(bytearray(self.file.read(768)), dtype=torch.float32), 0


def test_a_plain_file_opened_before_the_fork_is_refused_too(tmp_path: Path) -> None:
    """Seen to fail: only HDF5 was looked for, and two workers read each other's rows without an error."""
    path = tmp_path / "rows.bin"
    path.write_bytes(numpy.random.default_rng(0).random((64, 192), dtype=numpy.float32).tobytes())
    data = Streamed(path)
    code, _, told = run(tmp_path / "out", data, residency="none", workers=2)
    assert (code, f"holds an open BufferedReader of {path} that 2 workers would share" in told) == (2, True)
    assert run(tmp_path / "alone", data, residency="none", workers=0)[0] == 0
    data.file.close()


def test_a_handle_in_each_process_is_fine(tmp_path: Path) -> None:
    data = LateOpened(hdf5_file(tmp_path / "rows.h5"))
    assert run(tmp_path / "out", data, residency="none", workers=4)[0] == 0
    early = EarlyOpened(hdf5_file(tmp_path / "more.h5"))
    assert run(tmp_path / "in-process", early, residency="none", workers=0)[0] == 0


def test_damage_inside_the_file_is_found_while_training(tmp_path: Path) -> None:
    """One chunk is overwritten: the checksum of the format finds it, and the file, the key and the rows are named."""
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as file:
        pixels = numpy.random.default_rng(0).random((64, 192), dtype=numpy.float32)
        file.create_dataset("pixels", data=pixels, chunks=(8, 192), fletcher32=True)
        offset = file["pixels"].id.get_chunk_info(3).byte_offset
    content = bytearray(path.read_bytes())
    content[offset + 100] ^= 0xFF
    path.write_bytes(content)
    with feed.hdf5(path, ["pixels"], 8, device="cpu", num_workers=0) as batches, pytest.raises(DataError) as caught:
        list(batches)
    assert str(path) in caught.value.what
    assert "pixels" in caught.value.what
