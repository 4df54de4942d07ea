# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH105, PTH107, PTH123, PTH202, PTH207, PTH211, SIM115
# The plain calls are what is tested.
"""Inside a trial nothing of the user's is written, changed or deleted; what changed all the same is found."""

from __future__ import annotations

import bz2
import contextlib
import glob
import io
import lzma
import mmap
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy
import pytest
import torch

from fulltilt.recorder import attach
from fulltilt.tuning import safe_copies, users_files
from fulltilt.tuning.folder_watch import differences, look, taken_away
from fulltilt.tuning.made import clear_up
from fulltilt.tuning.processes import base_environment
from fulltilt.tuning.safe_copies import copy_files, keep_changed
from fulltilt.tuning.saves import Saves


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
    guard = Saves(tmp_path)
    homes = [
        torch,
        torch.UntypedStorage,
        sqlite3,
        bz2,
        lzma,
        *dict.fromkeys(home for home, _, _ in guard.files.guards()),
    ]
    before = [dict(vars(home)) for home in homes]
    guard.install()
    assert [dict(vars(home)) for home in homes] != before
    guard.restore()
    assert [dict(vars(home)) for home in homes] == before


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


@pytest.mark.parametrize("behind_a_link", [False, True])
def test_a_scratch_folder_may_be_given_in_any_way(tmp_path: Path, theirs: Path, behind_a_link: bool) -> None:
    """As with `--out ../study`: a path aside was taken for one of the user's, and put aside for ever."""
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    scratch = tmp_path / "link" / "scratch" if behind_a_link else Path("..") / "scratch"
    guard = Saves(scratch)
    guard.install()
    try:
        torch.save({"epoch": 1}, "model.pt")
        aside = guard.files.aside("model.pt")
        assert not guard.files.is_path(aside)
        assert not guard.files.is_path(os.path.realpath(aside))
        Path(os.path.realpath(aside)).write_text("x")
        os.replace("model.pt", "best.pt")
    finally:
        guard.restore()
    assert kept(theirs)
    assert sorted(path.name for path in scratch.rglob("*.pt")) == ["best.pt"]


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


def test_checkpoints_are_found_by_looking_into_their_folder(saves: Saves, theirs: Path) -> None:
    """The newest by a glob, all but the last two deleted, a link to the best, a copy of the whole folder."""
    for step in (10, 20, 30):
        folder = Path("ckpt") / f"step{step}"
        folder.mkdir(parents=True)
        torch.save({"step": step}, folder / "model.pt")
        (folder / "meta.json").write_text("{}")
        (folder / "model.pt").chmod(0o600)
    found = glob.glob("ckpt/*/model.pt")
    assert sorted(found) == [f"ckpt/step{step}/model.pt" for step in (10, 20, 30)]
    assert max(found, key=os.path.getmtime) in found
    shutil.rmtree("ckpt/step10")
    assert sorted(path.name for path in Path("ckpt").iterdir()) == ["step20", "step30"]
    assert not Path("ckpt/step10/model.pt").exists()
    os.symlink("ckpt/step30/model.pt", "best.pt")
    assert torch.load("best.pt") == {"step": 30}
    shutil.copytree("ckpt/step30", "export")
    assert sorted(os.listdir("export")) == ["meta.json", "model.pt"]
    assert [entry.name for entry in os.scandir() if entry.is_file()] == ["model.pt", "best.pt"]
    assert [sorted(files) for _, _, files in os.walk("ckpt") if files] == [["meta.json", "model.pt"]] * 2
    saves.restore()
    assert not list(theirs.rglob("step*/model.pt"))
    assert kept(theirs)


def test_rights_and_times_of_what_was_there_stay(saves: Saves, theirs: Path) -> None:
    before = (theirs / "model.pt").stat()
    torch.save({"w": 1}, "model.pt")
    os.chmod("model.pt", 0o400)
    os.utime("model.pt", (1, 1))
    Path("model.pt").touch()
    shutil.copy(shutil.__file__, "model.pt")
    saves.restore()
    after = (theirs / "model.pt").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_what_a_trial_leaves_behind_is_taken_away(tmp_path: Path, theirs: Path) -> None:
    """Its lock would keep others from training; half a checkpoint would be taken for a whole one."""
    study, trial = tmp_path / "study", tmp_path / "study" / "trial-1"
    guard = Saves(trial / "scratch", study)
    guard.install()
    try:
        os.makedirs("data")
        Path("data/prepared.npy").write_text("made once, before training")
        open("train.lock", "x").close()
        os.close(os.open("raw.lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        guard.files.trains = True
        os.makedirs("runs/first")
        torch.save({}, "runs/first/model.pt")
        Path("runs/first/meta.json").write_text("{}")
        Path("runs/state.tmp").write_text("{}")
        os.replace("runs/state.tmp", "runs/state.json")
        Path("runs/theirs.txt").write_text("{}")
    finally:
        guard.restore()
    (theirs / "other").write_text("by somebody else meanwhile")
    (theirs / "other").replace(theirs / "runs" / "theirs.txt")
    gone = clear_up(trial, study)
    names = ("train.lock", "raw.lock", "runs/first/meta.json", "runs/state.json")
    assert taken_away(gone, theirs) == (
        "new raw.lock, runs/first/meta.json, runs/state.json and 1 more; taken away again",
    )
    assert not any((theirs / name).exists() for name in names)
    left = sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*") if path.is_file())
    assert left == ["data/prepared.npy", "model.pt", "runs/theirs.txt"]


def test_a_later_trial_makes_the_folders_of_an_earlier_one_again(tmp_path: Path, theirs: Path) -> None:
    study = tmp_path / "study"
    (theirs / "old").mkdir()
    for trial in (study / "trial-1", study / "trial-2"):
        guard = Saves(trial / "scratch", study)
        guard.install()
        try:
            os.makedirs("runs/first")
            with pytest.raises(FileExistsError):
                os.mkdir("old")
        finally:
            guard.restore()
        clear_up(trial, study)
    assert (theirs / "runs" / "first").is_dir()
    clear_up(study, study)
    assert sorted(path.name for path in theirs.iterdir()) == ["model.pt", "old"], "folders that stayed empty"


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
        lambda: io.FileIO("model.pt", "r+").write(b"raw"),
        lambda: io.FileIO(Path("model.pt"), "wb").close(),
        lambda: type("Log", (io.FileIO, io.RawIOBase), {})("model.pt", "a").write(b"more"),
        lambda: (os.link("model.pt", "backup.pt"), Path("model.pt").write_text("new"), os.remove("backup.pt")),
        lambda: bz2.open("model.pt", "w").close(),
        lambda: lzma.open("model.pt", "w").close(),
        lambda: sqlite3.Connection("model.pt").execute("create table t(x)"),
        lambda: sqlite3.connect(f"file:{Path.cwd()}/model.pt?cache=private", uri=True).execute("create table t(x)"),
        lambda: torch.from_file("model.pt", shared=True, size=4, dtype=torch.uint8).fill_(7),
        lambda: torch.UntypedStorage.from_file("model.pt", True, 4).fill_(7),
    ],
    ids=[
        *("remove", "unlink", "write", "append", "rename", "rmtree", "truncate", "raw", "sqlite", "h5py", "replace"),
        *("copy", "move", "fileio", "fileio-new", "fileio-subclass", "link", "bz2", "lzma", "connection", "uri"),
        *("from_file", "storage"),
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


def test_what_a_job_deletes_is_not_found_again(saves: Saves, theirs: Path) -> None:
    """``rmtree(out); makedirs(out)``: whether to resume is then asked of an empty folder."""
    (theirs / "out" / "old").mkdir(parents=True)
    (theirs / "out" / "last.pt").write_text("a week's work")
    saves.files._began = time.time() + 60  # as if it had been there before
    shutil.rmtree("out")
    assert not Path("out").exists()
    assert "out" not in os.listdir()
    with pytest.raises(FileNotFoundError):
        os.listdir("out")
    os.makedirs("out/old")
    assert (os.listdir("out"), [entry.name for entry in os.scandir(b"out")]) == (["old"], [b"old"])
    assert not Path("out/last.pt").exists()
    assert not os.access("out/last.pt", os.R_OK)
    assert not glob.glob("out/*.pt")
    with pytest.raises(FileNotFoundError):
        open("out/last.pt")
    with pytest.raises(FileNotFoundError):
        torch.load("out/last.pt")
    Path("out/last.pt").write_text("anew")
    assert (Path("out/last.pt").read_text(), sorted(os.listdir("out"))) == ("anew", ["last.pt", "old"])
    shutil.rmtree("out")
    assert not Path("out").exists()
    saves.restore()
    assert (theirs / "out" / "last.pt").read_text() == "a week's work"


def test_what_a_job_renames_is_found_at_its_new_name(saves: Saves, theirs: Path) -> None:
    os.rename("model.pt", "previous.pt")
    assert (Path("previous.pt").read_text(), Path("model.pt").exists()) == ("the user's checkpoint", False)
    Path("model.pt").write_text("new")
    assert (Path("previous.pt").read_text(), Path("model.pt").read_text()) == ("the user's checkpoint", "new")
    saves.restore()
    assert kept(theirs)
    assert [path.name for path in theirs.iterdir()] == ["model.pt"]


@pytest.mark.parametrize(
    "remove", [lambda: shutil.rmtree("ckpt"), lambda: os.rename("ckpt", "elsewhere")], ids=["rmtree", "rename"]
)
def test_a_folder_stays_the_users_when_a_trial_writes_into_it(theirs: Path, tmp_path: Path, remove: Any) -> None:
    (theirs / "ckpt" / "old").mkdir(parents=True)
    (theirs / "ckpt" / "old" / "epoch-9.pt").write_text("a week's work")
    time.sleep(0.02)
    guard = Saves(tmp_path / "scratch")
    guard.install()
    try:
        Path("ckpt/old/started.txt").write_text("x")
        Path("ckpt/started.txt").write_text("x")
        remove()
    finally:
        guard.restore()
    assert (theirs / "ckpt" / "old" / "epoch-9.pt").read_text() == "a week's work"


@pytest.mark.parametrize("makes_it_first", [False, True])
def test_written_beside_and_renamed_over_it_stays_too(saves: Saves, theirs: Path, makes_it_first: bool) -> None:
    name = tempfile.mkstemp(dir=theirs)[1] if makes_it_first else "model.pt.tmp"
    torch.save({"epoch": 2}, name)
    os.replace(name, "model.pt")
    assert torch.load("model.pt") == {"epoch": 2}
    saves.restore()
    assert kept(theirs)
    assert [path.name for path in theirs.iterdir()] == ["model.pt"]


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


def test_a_file_too_large_to_copy_is_read_and_not_changed(
    saves: Saves, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """np.memmap opens for writing unless it is told otherwise: most jobs only read."""
    monkeypatch.setattr(users_files, "LARGEST_COPY_BYTES", 4)
    mapped = numpy.memmap("model.pt", dtype=numpy.uint8)
    assert bytes(mapped[:3]) == b"the"
    mapped[:3] = 0
    mapped.flush()
    with open("model.pt", "r+b") as file:
        assert file.read(3) == b"the"
        with pytest.raises(io.UnsupportedOperation):
            file.write(b"x")
    descriptor = os.open("model.pt", os.O_RDWR)
    mmap.mmap(descriptor, 0)[:3] = b"xxx"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    torch.from_file("model.pt", shared=True, size=4, dtype=torch.uint8).fill_(7)
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect("model.pt").execute("create table t(x)")
    with pytest.raises(OSError, match=r"file signature not found|Unable"):
        h5py.File("model.pt", "a")
    Path("model.pt").open("ab").write(b"more")
    assert saves.files.kept == ["model.pt"]
    saves.restore()
    assert kept(theirs)


def test_databases_of_the_users_are_read_and_changed_aside(theirs: Path, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect("a b.db")) as theirs_own:
        theirs_own.execute("create table t(x)")
    before = (theirs / "a b.db").read_bytes()
    time.sleep(0.02)
    guard = Saves(tmp_path / "scratch")
    guard.install()
    try:
        for connect in (
            lambda: sqlite3.Connection(database="a b.db"),
            lambda: sqlite3.connect(f"file://{theirs}/a%20b.db?mode=rw", uri=True),
            lambda: sqlite3.connect(b"a b.db"),
        ):
            with contextlib.closing(connect()) as connection:
                assert isinstance(connection, sqlite3.Connection)
                connection.execute("insert into t values (1)")
                connection.commit()
        with contextlib.closing(sqlite3.connect("file:a b.db?mode=ro", uri=True)) as connection:
            assert connection.execute("select count(*) from t").fetchone() == (3,)
        with contextlib.closing(sqlite3.connect("file::memory:?cache=shared", uri=True)) as connection:
            connection.execute("create table t(x)")
        assert isinstance(open("model.pt", "rb", buffering=0), io.FileIO)
        assert not isinstance(io.BytesIO(), io.FileIO)
        assert issubclass(type(open("model.pt", "rb", buffering=0)), io.FileIO)
    finally:
        guard.restore()
    assert (theirs / "a b.db").read_bytes() == before
    assert sorted(path.name for path in theirs.iterdir()) == ["a b.db", "model.pt"]


@pytest.mark.parametrize("missing", ["scratch", "fulltilt"])
def test_no_line_of_a_script_runs_without_its_guards(missing: str, tmp_path: Path) -> None:
    """Neither where the scratch folder cannot be made nor in another Python, which may not read this code."""
    (tmp_path / "file").write_text("no folder")
    environment = {
        **base_environment(tmp_path / ("file" if missing == "scratch" else "study") / "scratch"),
        **attach.environment(tmp_path, 0, None, 0),
    }
    if missing == "fulltilt":
        environment[attach.FIRST] = "fulltilt.no_such_module"
    command = [sys.executable, "-c", "print('the script')"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (7, "")
    assert "your files cannot be guarded here" in ended.stderr


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


def test_what_is_written_past_python_can_be_had_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, study = tmp_path / "project", tmp_path / "study"
    (project / "notes").mkdir(parents=True)
    study.mkdir()
    for name in ("changed", "deleted", "same", "unread", "notes/changed"):
        (project / name).write_text(f"the user's {name}")
    (project / "large").write_bytes(bytes(5000))
    (project / "unread").chmod(0)
    monkeypatch.setattr(safe_copies, "MOST_BYTES", 1000)
    copy_files(look(project, study), project, study)
    os.system(f"cd {project}; echo x >> changed; rm deleted; echo x > notes/changed; echo x > large")
    assert keep_changed(project, study) == ["changed", "deleted", "notes/changed"]
    (project / "changed").write_text("by a trial")
    copy_files(look(project, study), project, study)  # the study goes on: what was there first stays
    assert keep_changed(project, study) == ["changed", "deleted", "notes/changed"]
    for name in ("changed", "deleted", "notes/changed"):
        assert (study / "before" / name).read_text() == f"the user's {name}"
    assert sorted(path.name for path in (study / "before").iterdir()) == ["changed", "deleted", "notes"]


def test_no_copies_are_made_where_the_disk_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "notes").write_bytes(bytes(50))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 900, 100))
    copy_files(look(tmp_path / "project", tmp_path / "study"), tmp_path / "project", tmp_path)
    assert not (tmp_path / "before").exists()
    assert keep_changed(tmp_path / "project", tmp_path) == []
