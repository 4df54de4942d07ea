# ruff: noqa: PTH103, PTH104, PTH105, PTH107, PTH123, PTH202, PTH211, SIM115 - the plain calls are what is tested
"""Inside a trial nothing of the user's is written, changed or deleted; what changed all the same is found."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest
import torch

from fulltilt.tune.folder_watch import differences, look
from fulltilt.tune.saves import Saves


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "model.pt").write_text("the user's checkpoint")
    monkeypatch.chdir(folder)
    time.sleep(0.02)  # file systems stamp in steps of some milliseconds
    return folder


@pytest.fixture
def saves(tmp_path: Path, theirs: Path) -> Iterator[Saves]:
    guard = Saves(tmp_path / "scratch")
    guard.install()
    yield guard
    guard.restore()


def kept(folder: Path) -> bool:
    return (folder / "model.pt").exists() and (folder / "model.pt").read_bytes() == b"the user's checkpoint"


def test_every_entry_point_is_put_back(tmp_path: Path) -> None:
    before = (torch.save, open, os.remove, os.replace, shutil.rmtree, os.open, os.mkdir, sqlite3.connect)
    guard = Saves(tmp_path)
    guard.install()
    assert torch.save is not before[0]
    guard.restore()
    after = (torch.save, open, os.remove, os.replace, shutil.rmtree, os.open, os.mkdir, sqlite3.connect)
    assert after == before


def test_a_fork_goes_on_with_the_guards_that_the_script_has_imported_by_name(tmp_path: Path, theirs: Path) -> None:
    guard = Saves(tmp_path / "before")
    guard.install()
    try:
        save, load = torch.save, torch.load  # as `from torch import save` has them
        save("before the fork", "config.pt")
        guard.files.go_on_in(tmp_path / "trial")
        save("in the trial", "model.pt.tmp")
        os.replace("model.pt.tmp", "model.pt")
        assert (load("config.pt"), load("model.pt")) == ("before the fork", "in the trial")
    finally:
        guard.restore()
    assert [path.name for path in (tmp_path / "before").rglob("*.pt*")] == ["config.pt"]
    assert [path.name for path in theirs.iterdir()] == ["model.pt"]
    assert kept(theirs)


def test_saves_go_aside_and_are_found_again(saves: Saves, theirs: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch.save({"a": torch.ones(2)}, "model.pt")
    torch.save({"b": 1}, theirs / "new" / "deep.pt")
    safetensors.save_file({"w": torch.zeros(3)}, str(theirs / "model.safetensors"))
    assert torch.equal(torch.load("model.pt")["a"], torch.ones(2))
    assert torch.load("new/deep.pt") == {"b": 1}
    assert list(safetensors.load_file("model.safetensors")) == ["w"]
    saves.restore()
    assert kept(theirs)
    assert [path.name for path in theirs.iterdir()] == ["model.pt"]
    assert saves.diverted == 3


def test_what_was_saved_aside_is_there_to_the_job(saves: Saves, theirs: Path) -> None:
    """As scripts go on with a checkpoint: its size in the log, the best one copied, the last but one deleted."""
    for name in ("epoch-0.pt", "epoch-1.pt"):
        torch.save({"w": torch.ones(3)}, name)
    assert os.path.getsize("epoch-0.pt") > 100
    assert (theirs / "epoch-1.pt").exists()
    shutil.copy("epoch-1.pt", "best.pt")
    shutil.copyfile("epoch-1.pt", theirs / "model.pt")
    assert "w" in torch.load("best.pt")
    os.remove("epoch-0.pt")
    assert not (theirs / "epoch-0.pt").exists()
    saves.restore()
    assert kept(theirs)
    assert [path.name for path in theirs.iterdir()] == ["model.pt"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda: os.remove("model.pt"),
        lambda: Path("model.pt").unlink(),
        lambda: Path("model.pt").write_text("overwritten"),
        lambda: open("model.pt", "ab").write(b"more"),
        lambda: os.rename("model.pt", "old.pt"),
        lambda: shutil.rmtree(Path.cwd()),
        lambda: os.truncate("model.pt", 0),
        lambda: os.write(os.open("model.pt", os.O_WRONLY | os.O_TRUNC), b"raw"),
        lambda: sqlite3.connect("model.pt").execute("create table t(x)"),
        lambda: h5py.File("model.pt", "w").close(),
        lambda: (Path("new.pt").write_text("new"), os.replace("new.pt", "model.pt")),
        lambda: shutil.copy(shutil.__file__, "model.pt"),
        lambda: shutil.move(shutil.copy("model.pt", "new.pt"), "model.pt"),
    ],
    ids=[
        *("remove", "unlink", "write", "append", "rename", "rmtree", "truncate", "raw", "sqlite", "h5py", "replace"),
        *("copy", "move"),
    ],
)
def test_what_was_there_stays(saves: Saves, theirs: Path, harm: object) -> None:
    with contextlib.suppress(sqlite3.DatabaseError):  # it is no database
        harm()  # type: ignore[operator]
    saves.restore()
    assert kept(theirs)
    assert [path.name for path in theirs.iterdir()] == ["model.pt"]


def test_what_a_job_deletes_is_gone_to_it(saves: Saves, theirs: Path) -> None:
    """``rmtree(out); makedirs(out)``, and a link to the latest checkpoint that is made anew."""
    (theirs / "old").mkdir()
    os.symlink("model.pt", "latest")
    saves.files._began = time.time() + 60  # as if both had been there before
    shutil.rmtree("old")
    os.makedirs("old")
    Path("old/new.txt").write_text("x")
    os.remove("latest")
    os.symlink("old/new.txt", "latest")
    os.remove("model.pt")
    with open("model.pt", "x") as file:
        file.write("mine")
    assert Path("model.pt").read_text() == "mine"
    saves.restore()
    assert kept(theirs)
    assert (theirs / "latest").readlink() == Path("model.pt")


def test_written_beside_and_renamed_over_it_stays_too(saves: Saves, theirs: Path) -> None:
    torch.save({"epoch": 2}, "model.pt.tmp")
    os.replace("model.pt.tmp", "model.pt")
    assert torch.load("model.pt") == {"epoch": 2}
    saves.restore()
    assert kept(theirs)


def test_a_trial_may_do_as_it_likes_with_its_own_files(saves: Saves, theirs: Path) -> None:
    Path("log.txt").write_text("one\n")
    with open("log.txt", "a") as log:
        log.write("two\n")
    assert Path("log.txt").read_text() == "one\ntwo\n"
    os.rename("log.txt", "log.old")
    os.remove("log.old")
    assert [path.name for path in theirs.iterdir()] == ["model.pt"]


def test_a_hugging_face_model_is_saved_aside(saves: Saves, theirs: Path) -> None:
    class Savable:
        def save_pretrained(self, save_directory: str) -> None:
            Path(save_directory).mkdir(exist_ok=True)
            (Path(save_directory) / "config.json").write_text("{}")

    module = type(os)("transformers.modeling_utils")
    module.PreTrainedModel = Savable  # type: ignore[attr-defined]
    saves._guard(module)
    Savable().save_pretrained("out")
    assert saves.files.aside("out/config.json").read_text() == "{}"
    assert not (theirs / "out").exists()


# --------------------------------------------------------------------------- what changed all the same


def test_new_changed_and_deleted_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text("x")
    own = tmp_path / "study"
    own.mkdir()
    before = look(tmp_path, own)
    (tmp_path / "tune.log").write_text("what this process prints")
    printed = (tmp_path / "tune.log").stat()
    monkeypatch.setattr(os, "fstat", lambda _: printed)
    (tmp_path / "a.txt").write_text("xy")
    (tmp_path / "b.txt").unlink()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "d.txt").write_text("x")
    (own / "trials.jsonl").write_text("{}")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "m.pyc").write_text("x")
    assert differences(before, look(tmp_path, own)) == ("changed a.txt", "deleted b.txt", "new logs/d.txt")


def test_a_folder_too_large_to_look_at_is_not_guessed_about(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    part = look(tmp_path, tmp_path / "study", limit_s=-1.0)
    assert not part.whole
    assert differences(look(tmp_path, tmp_path / "study"), part) == ()
