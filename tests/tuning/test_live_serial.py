"""What speaks against workers for a loader that has none, seen around real fetches."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO
from unittest.mock import patch

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

from fulltilt.tuning.live.anatomy import anatomy
from fulltilt.tuning.live.serial import LOOK_CLOSELY_FIRST, FetchWatch
from fulltilt.tuning.live.surface import surface

# Outside of the data sets: what their code uses counts as well.
READ: list[TextIO] = []
WRITTEN: list[TextIO] = []
SCALE = 1.0
KNOWN: dict[int, Any] = {}


class Lines(Dataset[Any]):
    """Takes its samples from a file that stays open."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        READ[0].seek(2 * index)
        return torch.tensor(int(READ[0].readline()))


class Logged(Dataset[Any]):
    """Writes a line for every sample, as a logger or another thread would."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        WRITTEN[0].write(f"{index}\n")
        WRITTEN[0].flush()
        return torch.tensor(index)


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> Any:
    (tmp_path / "data").write_text("".join(f"{index}\n" for index in range(8)))
    with (tmp_path / "data").open() as read, (tmp_path / "log").open("a+") as written:
        READ[:], WRITTEN[:] = [read], [written]
        yield
    READ.clear()
    WRITTEN.clear()
    KNOWN.clear()


class Holding(Dataset[Any]):
    """Has something about it that fetching a sample does not depend on."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


class Remembering(Holding):
    """Keeps what it has read."""

    def __getitem__(self, index: int) -> Any:
        self.held[index] = np.full(2, index)
        return torch.from_numpy(self.held[index])


class RememberingElsewhere(Holding):
    def __getitem__(self, index: int) -> Any:
        return KNOWN.setdefault(index, torch.tensor(index))


class WithThreads(Holding):
    def __getitem__(self, index: int) -> Any:
        return self.held.submit(torch.tensor, index).result()


class Scaled(Holding):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index * SCALE)


class Staged(Holding):
    def __getitem__(self, index: int) -> float:
        return index * float(os.environ.get("STAGE", "1"))


class Normalised(Holding):
    """Divides a large picture by its mean, as many do."""

    def __getitem__(self, index: int) -> Any:
        pixels = self.held + index
        return pixels[:4] / pixels.mean()


def problem_of(dataset: Dataset[Any], batch_size: int = 1) -> str | None:
    iterator = iter(DataLoader(dataset, batch_size=batch_size))
    watch = FetchWatch(iterator)
    for _ in range(LOOK_CLOSELY_FIRST):
        next(iterator)
    return watch.problem()


def test_a_file_that_is_read_on_would_be_shared_by_workers() -> None:
    found = problem_of(Lines())
    assert found is not None
    assert "reads from a file that stays open" in found


def test_a_file_that_is_only_written_to_is_no_reason_against_workers() -> None:
    """Fulltilt's own record is one: written during a fetch, it kept a starved job without workers."""
    assert problem_of(Logged()) is None


def infos_of_a_tar_and_a_zip(tmp_path: Path) -> list[Any]:
    with zipfile.ZipFile(tmp_path / "z", "w") as packed, tarfile.open(tmp_path / "t", "w") as tape:
        packed.writestr("a", "1")
        tape.addfile(tarfile.TarInfo("a"))
        return [packed, tape, *packed.infolist(), *tape.getmembers()]


def rows(_: Path) -> list[Any]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.row_factory = sqlite3.Row
        return connection.execute("select 1 as a").fetchall()


def closed_h5(tmp_path: Path) -> Any:
    with h5py.File(tmp_path / "h5", "w") as file:
        return file


def inferred(_: Path) -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2) + 1


HARMLESS: dict[str, Callable[[Path], Any]] = {
    "a NaN": lambda _: float("nan"),
    "a tensor of inference mode, which has no version": inferred,
    "pictures, which are arrays without a size in bytes": lambda _: [Image.new("L", (2, 2))],
    "an index of archives that are closed": infos_of_a_tar_and_a_zip,
    "rows of a data base": rows,
    "an HDF5 file that is closed": closed_h5,
    "a logger with its files": lambda _: logging.getLogger("fulltilt.tests"),
    "bytes as a file": lambda _: [io.BytesIO(b"1"), io.StringIO("1")],
    "paths, which remember their text": lambda tmp_path: [tmp_path / "a"],
    "threads that nobody has used": lambda _: ThreadPoolExecutor(1),
}


@pytest.mark.parametrize("what", sorted(HARMLESS))
def test_what_many_data_sets_hold_is_no_reason_against_workers(what: str, tmp_path: Path) -> None:
    """Each of these kept a starved job without workers, or ended it."""
    assert problem_of(Holding(HARMLESS[what](tmp_path))) is None


def test_threads_of_the_data_sets_own_would_not_be_in_a_worker() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert "threads or processes of its own (WithThreads.held)" in str(problem_of(WithThreads(threads)))


def test_a_store_of_many_arrays_is_seen_to_grow() -> None:
    """After one batch it is too long to be walked, and its arrays have no hash."""
    assert "(Remembering.held)" in str(problem_of(Remembering({}), batch_size=256))


def test_a_store_outside_of_the_data_set_is_seen_to_grow() -> None:
    assert "(KNOWN)" in str(problem_of(RememberingElsewhere(None)))


def test_a_global_that_the_data_set_uses_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that lived on to the next epoch read the last one's: a wrong sample, and nobody would have known."""
    data = Scaled(None)
    before = anatomy(data)
    assert anatomy(data).change_from(before) is None
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    assert anatomy(data).change_from(before) == "SCALE"
    staged = Staged(None)
    earlier = anatomy(staged), anatomy(data)
    monkeypatch.setenv("STAGE", "2")
    assert anatomy(staged).change_from(earlier[0]) == "os.environ"
    assert anatomy(data).change_from(earlier[1]) is None, "it does not ask for any"


@pytest.mark.parametrize("change", ["a global", "an entry of a global", "an array", "a function's global", "deep"])
def test_what_a_script_may_change_in_the_middle_of_a_pass_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without workers the next batch has it."""
    noise = np.zeros(3)
    makers = Scaled(noise), RememberingElsewhere(None), lambda batch: [one * SCALE for one in batch]
    flip = SimpleNamespace(p=0.5)
    subset = Subset(Holding(SimpleNamespace(transforms=[flip])), range(1))
    others = {"a function's global": makers[2:], "an entry of a global": makers[1:2], "deep": (subset,)}
    seen = others.get(change, makers[:1])
    before = surface(*seen)
    assert surface(*seen) == before
    if change == "an array":
        noise[1] = 0.5
    elif change == "deep":
        flip.p = 0.0
    elif change == "an entry of a global":
        monkeypatch.setitem(KNOWN, 9, 1.0)
    else:
        monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    assert surface(*seen) != before


def test_a_data_set_that_fails_to_be_looked_at_is_left_alone_and_its_job_goes_on() -> None:
    iterator = iter(DataLoader(Holding(None), batch_size=1))
    watch = FetchWatch(iterator)
    with patch("fulltilt.tuning.live.serial.file_positions", side_effect=RuntimeError("not today")):
        assert next(iterator).tolist() == [0]
    assert "cannot be looked at (RuntimeError: not today)" in str(watch.problem())


def rounds_differently(data: Dataset[Any]) -> bool:
    """Whether one of the first samples has other bits with one thread than with two."""
    bits = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        bits.append(torch.stack([data[index] for index in range(100)]))
    return not torch.equal(*bits)


def test_a_sum_that_one_thread_rounds_differently_is_a_reason_against_workers() -> None:
    """Weights would not be those of the plain run. With one thread in the training process there is no difference."""
    before = torch.get_num_threads()
    data = Normalised(torch.rand(1 << 17, generator=torch.Generator().manual_seed(0)))
    try:
        assert rounds_differently(data)
        torch.set_num_threads(2)
        assert "adds up large tensors (mean)" in str(problem_of(data))
        assert problem_of(Normalised(torch.rand(1 << 10))) is None
        torch.set_num_threads(1)
        assert problem_of(data) is None
    finally:
        torch.set_num_threads(before)
