"""Folders of made data: complete or not there, and never somebody else's."""

from __future__ import annotations

import functools
import json
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from fulltilt.cli import main as command
from fulltilt.errors import UsageError
from fulltilt.recipes.synthetic import folder as made
from fulltilt.recipes.synthetic.parallel import spread


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
    assert "holds them already" in capsys.readouterr().out
    assert quick == [(3, 5)]
    assert run("text", str(tmp_path / "one"), "--size", "1") == 0
    assert capsys.readouterr().out.startswith("Made 1 text in ")
    assert json.loads((folder / made.MARK).read_text()) == {"kind": "text", "size": 3, "seed": 5}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["b"]


def test_it_refuses_a_folder_that_it_did_not_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert run("text", str(tmp_path), "--size", "3") == 2
    assert "Fulltilt did not make it" in capsys.readouterr().err
    assert run("text", str(tmp_path / "mine.txt"), "--size", "3") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_it_refuses_other_made_data_and_unknown_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("text", str(tmp_path / "d"), "--size", "3") == 0
    assert run("text", str(tmp_path / "d"), "--size", "4") == 2
    assert "holds other made data (kind text, size 3, seed 0)" in capsys.readouterr().err
    with pytest.raises(UsageError, match="did you mean text"):
        made.make_folder("txt", tmp_path / "e", 1, 0)


def test_a_maker_that_failed_or_was_killed_leaves_nothing_that_could_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "d"
    assert run("text", str(folder), "--size", "13") == 7
    told = capsys.readouterr().err
    assert "No space left" in told
    assert "Make room there" in told
    assert not any(tmp_path.iterdir()), "nothing of it, not even the lock"
    left = tmp_path / ".d.making"
    left.mkdir()
    (left / "0.txt").write_text("half")
    (left / "rubbish.txt").write_text("half")
    assert run("text", str(folder), "--size", "2") == 0
    assert sorted(path.name for path in folder.iterdir()) == ["0.txt", "1.txt", made.MARK]
    assert not left.exists()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert made.make_folder("text", tmp_path, 1, 0)
    assert (tmp_path / "0.txt").exists()


def touch(folder: Path, numbers: range) -> None:
    for number in numbers:
        (folder / str(number)).touch()


def test_pieces_cover_everything_once(tmp_path: Path) -> None:
    counts = list(spread(functools.partial(touch, tmp_path), 120))
    assert sorted(counts) == counts
    assert counts[-1] == 120
    assert {path.name for path in tmp_path.iterdir()} == {str(number) for number in range(120)}


def touch_slowly(folder: Path, numbers: range) -> None:
    time.sleep(0.05)
    touch(folder, numbers)


def test_what_is_not_begun_is_left_when_somebody_stops_it(tmp_path: Path) -> None:
    """Seen to fail: Ctrl-C waited until everything was made."""
    made_so_far = spread(functools.partial(touch_slowly, tmp_path), 5000)
    next(made_so_far)
    made_so_far.close()
    assert len([*tmp_path.iterdir()]) < 2500
