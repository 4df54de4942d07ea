"""What Fulltilt may write, replace and remove: only what it made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fulltilt.errors import ForeignFiles, MachineError, UsageError
from fulltilt.store.owned_folder import MARKER, OwnedFolder, kind_of, write_named_file


def claim(path: Path) -> OwnedFolder:
    return OwnedFolder.claim(path, "run folder")


def test_new_and_empty_folders_are_taken_others_refused(tmp_path: Path) -> None:
    claim(tmp_path / "a" / "new")
    (tmp_path / "empty").mkdir()
    claim(tmp_path / "empty")
    claim(tmp_path / "empty")
    assert kind_of(tmp_path / "empty") == "run folder"
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "thesis.tex").write_text("x")
    with pytest.raises(ForeignFiles, match=r"thesis\.tex"):
        claim(tmp_path / "users")
    assert os.listdir(tmp_path / "users") == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        claim(tmp_path / "users" / "thesis.tex")
    with pytest.raises(UsageError, match="holds a run folder, not a cache"):
        OwnedFolder.claim(tmp_path / "empty", "cache")


def test_folder_open_to_every_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(MachineError, match="every user"):
        claim(tmp_path / "open")


def test_foreign_file_is_never_replaced(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    (folder.path / "report.html").write_text("mine")
    with pytest.raises(ForeignFiles):
        folder.write("report.html", b"ours")
    assert not folder.remove("report.html")
    assert (folder.path / "report.html").read_text() == "mine"


@pytest.mark.parametrize("again", [False, True])
def test_own_file_is_replaced_until_somebody_puts_theirs_there(tmp_path: Path, again: bool) -> None:
    folder = claim(tmp_path / "run")
    for number in range(3):
        folder.write("report.html", str(number).encode(), again=again)
    assert (folder.path / "report.html").read_text() == "2"
    (folder.path / "other").write_text("mine")
    (folder.path / "other").replace(folder.path / "report.html")
    with pytest.raises(ForeignFiles):
        folder.write("report.html", b"ours", again=again)
    assert (folder.path / "report.html").read_text() == "mine"


def test_file_written_often_costs_one_line(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    for number in range(100):
        folder.write("rank-0.json", str(number).encode(), again=True)
    assert len((folder.path / MARKER).read_text().splitlines()) == 2


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_marker_that_is_no_file_makes_the_folder_foreign(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / MARKER)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ForeignFiles):
        claim(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    (tmp_path / "victim").write_text("mine")
    (folder.path / "rows.bin").symlink_to(tmp_path / "victim")
    (tmp_path / "elsewhere").mkdir()
    (folder.path / "inner").symlink_to(tmp_path / "elsewhere")
    for entry in ("rows.bin", "inner/rows.bin"):
        with pytest.raises(ForeignFiles):
            folder.create(entry)
        with pytest.raises(ForeignFiles):
            folder.write(entry, b"ours")
    assert (tmp_path / "victim").read_text() == "mine"
    assert os.listdir(tmp_path / "elsewhere") == []


def test_removing_a_tree_leaves_what_others_put_into_it(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    folder.make("checkpoints/step-1")
    folder.write("checkpoints/step-1/model.safetensors", b"weights")
    (folder.path / "checkpoints/step-1/notes.txt").write_text("mine")
    assert not folder.remove("checkpoints")
    assert (folder.path / "checkpoints/step-1/notes.txt").read_text() == "mine"
    assert not (folder.path / "checkpoints/step-1/model.safetensors").exists()
    (folder.path / "checkpoints/step-1/notes.txt").unlink()
    assert folder.remove("checkpoints")


def test_a_moved_file_that_grows_is_ours_when_a_kill_follows_the_rename(tmp_path: Path) -> None:
    folder = OwnedFolder.claim(tmp_path / "out", "cache")
    os.close(folder.create("rows.partial"))
    folder.move("rows.partial", "rows", growing=True)
    os.utime(folder.path / "rows", (1, 1))  # used by the next run, which knows only what the marker says
    assert OwnedFolder.claim(tmp_path / "out", "cache").owns("rows")


def test_a_file_whose_writer_was_killed_before_the_rename_is_still_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OwnedFolder.claim(tmp_path, "run").write("metrics.csv", b"first\n")
    for text in (b"never there\n", b"never there either\n"):
        with monkeypatch.context() as killed:
            killed.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                OwnedFolder.claim(tmp_path, "run").write("metrics.csv", text)
    assert OwnedFolder.claim(tmp_path, "run").owns("metrics.csv")
    assert (tmp_path / "metrics.csv").read_bytes() == b"first\n"
    (tmp_path / "metrics.csv").write_bytes(b"theirs\n")
    assert not OwnedFolder.claim(tmp_path, "run").owns("metrics.csv")


def test_moved_tree_is_still_ours(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    making = folder.temporary("model")
    making.mkdir()
    (making / "config.json").write_text("{}")
    folder.record_tree(making)
    folder.move(making, "model")
    assert folder.owns("model/config.json")
    again = OwnedFolder(folder.path)
    assert again.entries() == ["model", "model/config.json"]
    assert again.remove("model")
    assert again.entries() == []


def test_growing_file_is_known_until_it_is_replaced(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    fd = folder.create("steps.jsonl")
    os.write(fd, b"line\n")
    os.close(fd)
    assert OwnedFolder(folder.path).owns("steps.jsonl")
    folder.record("steps.jsonl")
    with (folder.path / "steps.jsonl").open("a") as file:
        file.write("mine\n")
    assert not OwnedFolder(folder.path).owns("steps.jsonl")


def test_copied_folder_knows_its_files_by_name_and_size(tmp_path: Path) -> None:
    import shutil

    folder = claim(tmp_path / "run")
    folder.write("report.html", b"ours")
    folder.write("notes.txt", b"ours")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "copy" / "notes.txt").write_bytes(b"edited by its user")
    copy = OwnedFolder(tmp_path / "copy")
    copy.write("report.html", b"written again")
    copy.write("report.html", b"and again")
    assert (tmp_path / "copy" / "report.html").read_bytes() == b"and again"
    with pytest.raises(ForeignFiles):
        copy.write("notes.txt", b"again")
    assert (tmp_path / "copy" / "notes.txt").read_bytes() == b"edited by its user"


def test_lock_is_held_by_one(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    with folder.locked("busy"), pytest.raises(UsageError, match="busy"), OwnedFolder(folder.path).locked("busy"):
        pass
    with folder.locked("busy"):
        pass


def test_paths_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    for entry in ("../x", tmp_path / "x", ".", MARKER):
        with pytest.raises(ValueError, match="not an entry"):
            folder.remove(entry)


def test_damaged_marker_lists_nothing_and_raises_nothing(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    folder.write("report.html", b"ours")
    text = (folder.path / MARKER).read_bytes()
    (folder.path / MARKER).write_bytes(text[: text.index(b"\n") + 1] + b'{"path": 3}\nnonsense\n[[[[\n{"path": "x"')
    assert OwnedFolder(folder.path).entries() == []


def test_named_file_is_replaced_only_with_signature(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_named_file(page, b"<made by us>", signature=b"by us")
    write_named_file(page, b"<made by us> 2", signature=b"by us")
    assert page.read_bytes() == b"<made by us> 2"
    page.write_text("mine")
    with pytest.raises(ForeignFiles):
        write_named_file(page, b"<made by us>", signature=b"by us")
    assert page.read_text() == "mine"


def test_relative_paths_are_those_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = claim(Path("run"))
    folder.write(Path("run") / "run.json", b"{}")
    folder.write("run/run.json".removeprefix("run/"), b"{ }")
    assert (tmp_path / "run" / "run.json").read_bytes() == b"{ }"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert folder.owns("run.json")


def test_an_announced_entry_is_ours_and_a_foreign_one_is_refused(tmp_path):
    folder = OwnedFolder.claim(tmp_path / "out", "copy")
    folder.announce("files", "files/a", "files/b")
    (folder.path / "files").mkdir()
    (folder.path / "files" / "a").write_text("")
    assert folder.entries() == ["files", "files/a"]
    (folder.path / "mine").write_text("")
    with pytest.raises(ForeignFiles):
        folder.announce("mine")
    assert not folder.remove_all()
    (folder.path / "mine").unlink()
    assert folder.remove_all()
    assert not folder.path.exists()


def test_a_private_folder_is_no_link_and_not_open_to_all(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("link", "open"):
        with pytest.raises(MachineError, match="only this user may write"):
            OwnedFolder.claim_private(tmp_path / name, "cache", flag="cache_dir")
    made = OwnedFolder.claim_private(tmp_path / "new", "cache", flag="cache_dir")
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert OwnedFolder.claim_private(tmp_path / "new", "cache", flag="cache_dir").path == made.path


def test_torn_line_of_the_marker_does_not_swallow_the_next(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    with (folder.path / MARKER).open("a") as marker:
        marker.write('{"path": "cut sho')  # as a kill leaves it
    folder.write("report.html", b"ours")
    assert OwnedFolder(folder.path).owns("report.html")


def test_announced_entries_are_known_before_they_are_recorded(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    folder.announce("partial", "partial/model")
    (folder.path / "partial").mkdir()
    (folder.path / "partial" / "model").write_text("half")  # killed before the record
    (folder.path / "partial" / "notes").write_text("mine")
    assert not OwnedFolder(folder.path).remove("partial")
    assert os.listdir(folder.path / "partial") == ["notes"]


def test_appending_goes_on_in_own_files_only(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    for text in (b"a", b"b"):
        fd = folder.append("error.log")
        os.write(fd, text)
        os.close(fd)
    assert (folder.path / "error.log").read_text() == "ab"
    (folder.path / "other.log").write_text("mine")
    with pytest.raises(ForeignFiles):
        folder.append("other.log")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_that_outlives_its_parent_does_not_hold_the_lock(tmp_path: Path) -> None:
    folder = claim(tmp_path / "run")
    reading, writing = os.pipe()
    with folder.locked("busy"):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # lives until the parent lets it go
            os._exit(0)
        with pytest.raises(UsageError, match="busy"), folder.locked("busy"):
            pass
    try:
        with folder.locked("busy"):
            pass
    finally:
        os.close(writing)
        os.waitpid(child, 0)
