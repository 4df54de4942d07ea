"""Folders of synthetic data: complete or not to be used, and never somebody else's."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from fulltilt.cli import main as command
from fulltilt.errors import UsageError
from fulltilt.recipes import synthetic
from fulltilt.recipes.synthetic import in_processes
from fulltilt.store.owned_folder import MARKER, OwnedFolder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A maker that writes a line for each sample; returns what it was asked for."""
    asked: list[tuple[int, int]] = []

    def make(folder: Path, size: int, seed: int) -> Iterator[int]:
        asked.append((size, seed))
        for number in range(size):
            (folder / f"{number}.txt").write_text(f"{seed}\n")
            yield number + 1
            if size == 13:
                raise OSError(28, "No space left on device")

    module = types.ModuleType("fulltilt.recipes.synthetic.text")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fulltilt.recipes.synthetic.text", module)
    return asked


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        command.main(["make-data", *arguments])
    return int(ended.value.code or 0)


def test_it_makes_once_and_knows_what_it_made(
    quick: list[tuple[int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a" / "b"
    assert run("text", str(folder), "--size", "3", "--seed", "5") == 0
    assert capsys.readouterr().out.startswith(f"Made 3 texts in {folder}")
    assert run("text", str(folder), "--size", "3", "--seed", "5") == 0
    assert "has this data already" in capsys.readouterr().out
    assert quick == [(3, 5)]
    assert run("text", str(tmp_path / "one"), "--size", "1") == 0
    assert capsys.readouterr().out.startswith("Made 1 text in ")
    assert json.loads((folder / synthetic.DESCRIPTION).read_text()) == {"kind": "text", "size": 3, "seed": 5}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["b"]
    assert sorted(path.name for path in folder.iterdir()) == [
        MARKER,
        "0.txt",
        "1.txt",
        "2.txt",
        synthetic.DESCRIPTION,
    ]


def test_foreign_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert run("text", str(tmp_path), "--size", "3") == 2
    assert "holds files that Fulltilt did not write: mine.txt" in capsys.readouterr().err
    assert run("text", str(tmp_path / "mine.txt"), "--size", "3") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert run("text", str(tmp_path / "run"), "--size", "1") == 0
    OwnedFolder.claim(tmp_path / "other", "run folder")
    assert run("text", str(tmp_path / "other"), "--size", "1") == 2


def test_other_synthetic_data_and_unknown_kinds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("text", str(tmp_path / "d"), "--size", "3") == 0
    assert run("text", str(tmp_path / "d"), "--size", "4") == 2
    assert "holds other synthetic data (kind text, size 3, seed 0)" in capsys.readouterr().err
    with pytest.raises(UsageError, match="did you mean text"):
        synthetic.make_folder("txt", tmp_path / "e", 1, 0)


def test_failure_leaves_nothing_but_the_marker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "d"
    assert run("text", str(folder), "--size", "13") == 7
    told = capsys.readouterr().err
    assert "No space left" in told
    assert "Make room there" in told
    assert [path.name for path in folder.iterdir()] == [MARKER]
    assert run("text", str(folder), "--size", "2") == 0


def test_leftovers_of_a_killed_maker_are_removed(tmp_path: Path) -> None:
    owned = OwnedFolder.claim(tmp_path / "d", "data set")
    left = owned.make(owned.temporary("making"))
    (left / "0.txt").write_text("half")
    owned.write("1.txt", b"moved before the kill")
    (owned.path / "notes.md").write_text("mine")
    assert run("text", str(owned.path), "--size", "1") == 0
    assert sorted(path.name for path in owned.path.iterdir()) == [MARKER, "0.txt", "notes.md", synthetic.DESCRIPTION]
    assert (owned.path / "0.txt").read_text() == "0\n"


def test_a_file_in_the_way_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owned = OwnedFolder.claim(tmp_path / "d", "data set")
    (owned.path / "0.txt").write_text("mine")
    assert run("text", str(owned.path), "--size", "2") == 2
    assert "was not written by Fulltilt" in capsys.readouterr().err
    assert (owned.path / "0.txt").read_text() == "mine"
    assert not (owned.path / synthetic.DESCRIPTION).exists()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert synthetic.make_folder("text", tmp_path, 1, 0)
    assert (tmp_path / "0.txt").exists()


def touch(folder: Path, numbers: range) -> None:
    for number in numbers:
        (folder / str(number)).touch()


def test_pieces_cover_everything_once(tmp_path: Path) -> None:
    assert list(in_processes(functools.partial(touch, tmp_path), 120)) == list(range(120))
    assert {path.name for path in tmp_path.iterdir()} == {str(number) for number in range(120)}


def touch_slowly(folder: Path, numbers: range) -> None:
    time.sleep(0.05)
    touch(folder, numbers)


def test_what_is_not_begun_is_left_when_somebody_stops_it(tmp_path: Path) -> None:
    """Seen to fail: Ctrl-C waited until everything was made."""
    begun = in_processes(functools.partial(touch_slowly, tmp_path), 5000)
    next(begun)
    begun.close()
    assert len([*tmp_path.iterdir()]) < 2500


def test_a_description_that_is_none_neither_hangs_nor_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    description = tmp_path / "texts" / synthetic.DESCRIPTION
    assert run("text", str(description.parent), "--size", "3") == 0
    description.unlink()
    os.mkfifo(description)
    assert run("text", str(description.parent), "--size", "3") == 2
    description.unlink()
    description.write_text("[]")
    assert run("text", str(description.parent), "--size", "3") == 2
    assert capsys.readouterr().err.count("was not written by Fulltilt and is left as it is") == 2
    assert description.read_text() == "[]"
