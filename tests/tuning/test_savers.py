"""Libraries that write files past Python's own calls: what they save goes aside, and what was there stays."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import pyarrow
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
import torchvision.io

from fulltilt.tuning.saves import Saves

THEIRS = b"the user's own"


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Saves]:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    Path("theirs").write_bytes(THEIRS)
    time.sleep(0.02)  # file systems stamp in steps of some milliseconds
    guard = Saves(tmp_path / "scratch")
    guard.install()
    yield guard
    guard.restore()


def traced() -> torch.jit.ScriptModule:
    return torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2))  # type: ignore[no-untyped-call, no-any-return]


def profiled(name: str) -> None:
    with torch.profiler.profile() as profile:
        torch.zeros(2).sum()
    profile.export_chrome_trace(name)


def exported(name: str) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),)), name)


TABLE = pyarrow.table({"a": [1, 2]})
PICTURE = torch.zeros(3, 4, 4, dtype=torch.uint8)

WRITERS: dict[str, Callable[[str], object]] = {
    "torch.jit.save": lambda name: torch.jit.save(traced(), name),
    "ScriptModule.save": lambda name: traced().save(name),
    "torch.export.save": exported,
    "torch.package": lambda name: torch.package.PackageExporter(name).close(),
    "profiler": profiled,
    "write_png": lambda name: torchvision.io.write_png(PICTURE, name),
    "write_table": lambda name: pyarrow.parquet.write_table(TABLE, name),
    "write_feather": lambda name: pyarrow.feather.write_feather(TABLE, name),
    "write_csv": lambda name: pyarrow.csv.write_csv(TABLE, name),
}


@pytest.mark.filterwarnings("ignore")  # torch.jit is on its way out
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_it_is_written_aside(saves: Saves, write: Callable[[str], object]) -> None:
    write("theirs")
    assert saves.files.aside("theirs").stat().st_size > 0
    write("new")
    saves.restore()
    assert Path("theirs").read_bytes() == THEIRS
    assert not Path("new").exists()


@pytest.mark.filterwarnings("ignore")
def test_it_is_there_to_the_job(saves: Saves) -> None:
    torch.jit.save(traced(), "theirs")  # type: ignore[no-untyped-call]
    assert torch.jit.load("theirs")(torch.zeros(1, 2)).shape == (1, 2)  # type: ignore[no-untyped-call]
    exported("program.pt2")
    assert torch.export.load("program.pt2").module()(torch.zeros(1, 2)).shape == (1, 2)
    torchvision.io.write_png(PICTURE, "picture.png")
    assert torch.equal(torchvision.io.read_image("picture.png"), PICTURE)
    pyarrow.parquet.write_table(TABLE, "table.parquet")
    assert pyarrow.parquet.read_table("table.parquet") == TABLE
    assert sorted(path.name for path in Path().iterdir()) == ["picture.png", "program.pt2", "table.parquet", "theirs"]
    saves.restore()
    assert [path.name for path in Path().iterdir()] == ["theirs"]


def insert() -> int:
    connection = sqlite3.connect("log.sqlite")
    connection.execute("CREATE TABLE IF NOT EXISTS log (step)")
    connection.execute("INSERT INTO log VALUES (1)")
    connection.commit()
    count: int = connection.execute("SELECT count(*) FROM log").fetchone()[0]
    connection.close()
    return count


def test_a_database_that_begins_while_the_job_trains_leaves_nothing_behind(saves: Saves) -> None:
    """They stayed, where all that is written with open() is taken away again."""
    saves.files.trains = True
    assert [insert(), insert()] == [1, 2]
    for _ in range(2):
        with h5py.File("log.h5", "a") as file:
            file.attrs["steps"] = file.attrs.get("steps", 0) + 1
    with h5py.File("log.h5") as file:
        assert file.attrs["steps"] == 2
    saves.restore()
    assert [path.name for path in Path().iterdir()] == ["theirs"]


def test_a_database_in_memory_stays_there(saves: Saves) -> None:
    saves.files.trains = True
    for _ in range(2):
        sqlite3.connect(":memory:").execute("CREATE TABLE log (step)")
    assert not saves.files.aside(":memory:").exists()


def test_a_database_that_is_made_before_stays(saves: Saves) -> None:
    assert insert() == 1
    saves.restore()
    assert Path("log.sqlite").exists()


@pytest.mark.parametrize("by", ["open", "os.open"])
def test_a_large_log_is_not_appended_to(saves: Saves, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """A file that would take too long to copy was written to."""
    monkeypatch.setattr("fulltilt.tuning.users_files.LARGEST_COPY_BYTES", 3)
    for _ in range(2):
        if by == "open":
            with Path("theirs").open("a", encoding="utf-8") as log:
                log.write("line")
        else:
            descriptor = os.open("theirs", os.O_WRONLY | os.O_APPEND)
            os.write(descriptor, b"line")
            os.close(descriptor)
    assert saves.files.aside("theirs").read_bytes() == b"lineline"
    saves.restore()
    assert Path("theirs").read_bytes() == THEIRS
