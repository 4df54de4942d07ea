"""JPEG files: the decoder is chosen by measurement, both give the same batches, and a bad file is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulltilt import feed
from fulltilt.errors import DataError, UsageError
from fulltilt.feed.jpeg import GPU_MARGIN, DecoderChoice, JpegFiles, choose_decoder, measure_decoders
from fulltilt.train.config import TrainSettings
from fulltilt.train.data_source import make_source
from fulltilt.train.sampler import EpochPlan

torchvision = pytest.importorskip("torchvision")
GPU = DecoderChoice("gpu", "as if there were one")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    made = []
    for number in range(12):
        generator = torch.Generator().manual_seed(number)
        small = torch.randint(0, 256, (1, 3, 5, 6), generator=generator).float()
        picture = torch.nn.functional.interpolate(small, (40 + number, 52), mode="bicubic").clamp(0, 255)
        torchvision.io.write_jpeg(picture[0].to(torch.uint8), str(folder / f"{number}.jpg"), quality=90)
        made.append(folder / f"{number}.jpg")
    return made


positive = st.floats(1, 1e6)


@given(cpu=positive, gpu=st.none() | positive)
def test_the_gpu_decodes_only_where_that_is_clearly_faster(cpu: float, gpu: float | None) -> None:
    choice = choose_decoder(cpu, gpu)
    assert choice.decoder == ("gpu" if gpu is not None and gpu > GPU_MARGIN * cpu else "cpu")
    assert choice.reason


@pytest.mark.parametrize("others", [None, list(range(12))], ids=["alone", "with labels"])
def test_a_batch_decoded_on_the_device_is_the_one_decoded_by_workers(files: list[Path], others: Any) -> None:
    names = [str(file) for file in files]
    by_workers = feed.jpeg(files, (16, 20), others)
    assert by_workers.choice.reason == "the decoded pictures fit in memory: each is decoded once"
    served = []
    for dataset in (by_workers, JpegFiles(names, (16, 20), others, GPU)):
        with feed.loader(dataset, 5, shuffle=True, device="cpu", num_workers=2, residency="ram") as loader:
            served.append([batch for _ in range(2) for batch in loader])
    for left, right in zip(*served, strict=True):
        pairs = [(left, right)] if others is None else list(zip(left, right, strict=True))
        assert all(torch.equal(one, other) for one, other in pairs)
    first = served[1][0] if others is None else served[1][0][0]
    assert first.shape == (5, 3, 16, 20)


def test_the_engine_finishes_batches_too(files: list[Path]) -> None:
    dataset = JpegFiles([str(file) for file in files], (16, 20), None, GPU)
    data = make_source(dataset, EpochPlan(samples=0, batch_size=4, shuffle=False), TrainSettings(residency="none"))
    batches = [step.batches[0] for step in data.steps(0, 0)]
    data.close()
    expected = feed.jpeg(files, (16, 20), decoder="cpu")
    assert torch.equal(torch.cat(batches), torch.stack([expected[number] for number in range(12)]))


def test_a_file_that_the_gpu_does_not_read_is_read_here(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> torch.Tensor:
        raise RuntimeError("nvjpegDecodeBatched failed: 2")

    monkeypatch.setattr(sys.modules["fulltilt.feed.jpeg"], "decode_on", refuses)  # the package's name is the function
    dataset = JpegFiles([str(file) for file in files], (16, 20), None, GPU)
    with feed.loader(dataset, 12, device="cpu", num_workers=0) as loader:
        (batch,) = loader
    expected = feed.jpeg(files, (16, 20), decoder="cpu")
    assert torch.equal(batch, torch.stack([expected[number] for number in range(12)]))


@pytest.mark.parametrize("choice", [GPU, DecoderChoice("cpu", "")], ids=["gpu", "cpu"])
def test_a_cut_file_is_named(files: list[Path], choice: DecoderChoice, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(files[3].read_bytes()[:100])
    names = [str(file) for file in (*files[:5], cut, *files[5:])]
    with (
        pytest.raises(DataError, match=r"cut\.jpg"),
        feed.loader(JpegFiles(names, (16, 20), None, choice), 4, device="cpu", num_workers=0, checks=2) as loader,
    ):
        list(loader)


def test_rates_are_measured_on_the_files_themselves(files: list[Path]) -> None:
    ticks = iter([10.0, 10.5])
    rates = measure_decoders(files, (16, 20), torch.device("cpu"), workers=4, clock=lambda: next(ticks))
    assert rates == (4 * 12 / 0.5, None)


def test_mistakes_are_told(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="12 files and 1 others"):
        feed.jpeg(files, (16, 20), [1])
    with pytest.raises(UsageError, match="has to be a list of files"):
        feed.jpeg("pictures", (8, 8))
    with pytest.raises(UsageError, match=r"has to be \(height, width\)"):
        feed.jpeg(["a.jpg"], 8)
    with pytest.raises(UsageError, match="no JPEG file"):
        feed.jpeg([], (16, 20))
    with pytest.raises(UsageError, match="no GPU to decode on"):
        feed.jpeg(files, (16, 20), decoder="gpu", device="cpu")
    with pytest.raises(DataError, match=r"none\.jpg cannot be read"):
        JpegFiles([str(tmp_path / "none.jpg")], (16, 20), None, GPU)
