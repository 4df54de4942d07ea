"""Staging: decided by measurement, whole or not at all, taken up again, cleaned up."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from fulltilt import feed
from fulltilt.errors import ForeignFiles, MachineError, UsageError
from fulltilt.feed import staging
from fulltilt.feed.staging import stage_dir, staging_pays
from fulltilt.records import StorageReading
from fulltilt.store.owned_folder import OwnedFolder

GIB = 1024**3


def reading(**known):
    known = {"kind": "ssd", "total_bytes": 10 * GIB, "counted_fully": True, "fits_in_ram": False} | known
    return StorageReading(path="/data", **known)


@pytest.mark.parametrize(
    ("known", "epochs", "free", "pays", "why"),
    [
        ({"kind": "tmpfs"}, 10, 100 * GIB, False, "in memory already"),
        ({"kind": "network"}, 10, 100 * GIB, True, "network"),
        ({"kind": "hdd"}, 10, 100 * GIB, True, "hdd"),
        ({"kind": "network"}, 1, 100 * GIB, False, "read once"),
        ({"kind": "network"}, 10, 10 * GIB, False, "do not fit"),
        ({"fits_in_ram": True}, 10, 100 * GIB, False, "page cache"),
        ({"small_cold_files_per_s": 100.0, "small_warm_files_per_s": 900.0}, 10, 100 * GIB, True, "900 files/s"),
        ({"small_cold_files_per_s": 600.0, "small_warm_files_per_s": 900.0}, 10, 100 * GIB, False, "too little"),
        ({}, 10, 100 * GIB, False, "could not be measured"),
        ({"counted_fully": False}, 10, 100 * GIB, False, "too large to count"),
    ],
)
def test_it_is_done_when_it_pays(known, epochs, free, pays, why):
    found, reason = staging_pays(reading(**known), epochs, free)
    assert found is pays
    assert why in reason


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    for number in range(20):
        path = folder / f"class{number % 3}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * (1000 + number))
    return folder


def same(left, right):
    names = sorted(str(path.relative_to(left)) for path in left.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(right)) for path in right.rglob("*") if path.is_file())
    assert all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


def test_the_copy_is_whole_and_goes_away(data, tmp_path):
    with feed.stage_dir(data, tmp_path / "stage", when="always") as staged:
        assert staged.staged
        same(data, staged.path)
    assert not staged.path.exists()
    assert data.exists()


def test_an_interrupted_copy_is_made_anew(data, tmp_path):
    first = stage_dir(data, tmp_path / "stage", when="always")
    os.close(first._lock.pop())  # as of a job that was killed …
    (first.folder / "whole").unlink()  # … while it copied
    (first.path / "class2" / "2.bin").write_bytes(b"x")
    with stage_dir(data, tmp_path / "stage", when="always") as again:
        same(data, again.path)
        assert again.folder == first.folder
    assert not again.folder.exists()


def test_too_little_room_is_told_before_anything_is_copied(data, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "free_disk_bytes", lambda folder: 10_000)
    with pytest.raises(MachineError, match="staging needs"):
        stage_dir(data, tmp_path / "stage", when="always")
    assert not (tmp_path / "stage").exists()


def test_a_disk_that_fills_up_is_told_and_emptied_again(data, tmp_path, monkeypatch):
    real = shutil.copyfile

    def full(source, target):
        if source.name == "7.bin":
            raise OSError(28, os.strerror(28))
        return real(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(MachineError, match="No space left"):
        stage_dir(data, tmp_path / "stage", when="always")
    assert not list((tmp_path / "stage").iterdir())


def test_the_original_is_used_where_it_does_not_pay(data, tmp_path):
    for when in ("never", "auto"):
        staged = stage_dir(data, tmp_path / "stage", when=when, epochs=1)
        assert not staged.staged
        assert staged.path == data
        staged.clean()
        assert data.exists()
    with pytest.raises(UsageError, match="does not exist"):
        stage_dir(tmp_path / "nothing")
    with pytest.raises(UsageError, match="sometimes"):
        stage_dir(data, when="sometimes")
    shutil.rmtree(tmp_path / "stage", ignore_errors=True)


def test_a_folder_behind_a_link_is_copied_and_a_circle_is_left(tmp_path):
    """Data sets are often put together of links; without them the copy would be a smaller data set."""
    elsewhere, data = tmp_path / "elsewhere", tmp_path / "data"
    elsewhere.mkdir()
    data.mkdir()
    (elsewhere / "a.bin").write_bytes(b"a")
    (data / "cats").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(data)
    with feed.stage_dir(data, tmp_path / "stage", when="always") as staged:
        assert (staged.path / "cats" / "a.bin").read_bytes() == b"a"
        assert len([path for path in staged.path.rglob("*") if path.is_file()]) == 1


def test_a_stage_within_the_data_is_refused(tmp_path):
    with pytest.raises(UsageError, match="within the data folder"):
        feed.stage_dir(tmp_path, tmp_path / "stage", when="always")


def test_foreign_files_in_the_copy_stay(data, tmp_path):
    with feed.stage_dir(data, tmp_path / "stage", when="always") as staged:
        (staged.path / "class0" / "mine.txt").write_text("mine")
    assert (staged.path / "class0" / "mine.txt").read_text() == "mine"
    assert not (staged.path / "class0" / "0.bin").exists()


@pytest.mark.parametrize("what", ["link", "folder", "open to all"])
def test_a_stage_that_others_have_prepared_is_refused(data, tmp_path, what):
    target = feed.stage_dir(data, tmp_path / "stage", when="always")
    target.clean()
    assert not target.folder.exists()
    victim = tmp_path / "victim"
    victim.mkdir()
    if what == "link":
        target.folder.symlink_to(victim)
    else:
        target.folder.mkdir()
        (target.folder / "theirs").write_text("")
        target.folder.chmod(0o777 if what == "open to all" else 0o755)
    with pytest.raises((MachineError, ForeignFiles)):
        feed.stage_dir(data, tmp_path / "stage", when="always")
    assert not list(victim.iterdir())
    target.clean()
    assert os.path.lexists(target.folder)


def test_a_copy_that_another_job_reads_stays_until_the_last(data, tmp_path):
    one, other = (stage_dir(data, tmp_path / "stage", when="always") for _ in range(2))
    one.clean()
    one.clean()
    same(data, other.path)
    other.clean()
    assert not other.folder.exists()


def remove_samples(data):
    (data / "class1" / "1.bin").unlink()
    (data / "class1" / "4.bin").rename(data / "class0" / "4.bin")
    shutil.rmtree(data / "class2")


def rewrite_with_the_same_size_and_time(data):
    """As `rsync -t` and tar do."""
    rewritten = data / "class1" / "1.bin"
    time_ns = rewritten.stat().st_mtime_ns
    time.sleep(0.02)  # the clock of file systems is coarse
    rewritten.write_bytes(b"n" * 1001)
    os.utime(rewritten, ns=(time_ns, time_ns))


@pytest.mark.parametrize("change", [remove_samples, rewrite_with_the_same_size_and_time])
def test_changed_data_gets_another_copy_and_the_old_one_stays(data, tmp_path, change):
    shutil.copytree(data, tmp_path / "before")
    with stage_dir(data, tmp_path / "stage", when="always") as old:
        change(data)
        with stage_dir(data, tmp_path / "stage", when="always") as new:
            same(data, new.path)
            assert sorted(path.name for path in new.path.iterdir()) == sorted(path.name for path in data.iterdir())
            same(tmp_path / "before", old.path)
    assert not list((tmp_path / "stage").iterdir())


def test_a_copy_of_a_killed_job_is_used(data, tmp_path, monkeypatch):
    first = stage_dir(data, tmp_path / "stage", when="always")
    os.close(first._lock.pop())
    monkeypatch.setattr(shutil, "copyfile", lambda *_: pytest.fail("it is there"))
    with stage_dir(data, tmp_path / "stage", when="always") as again:
        same(data, again.path)
    assert not first.folder.exists()


def test_an_old_copy_that_nobody_reads_is_removed(data, tmp_path):
    old = stage_dir(data, tmp_path / "stage", when="always")
    os.close(old._lock.pop())  # as of a job that was killed
    remove_samples(data)
    with stage_dir(data, tmp_path / "stage", when="always") as new:
        same(data, new.path)
        assert list((tmp_path / "stage").iterdir()) == [new.folder]


def test_all_files_of_a_copy_are_removed_in_one_pass(data, tmp_path, monkeypatch):
    staged, removed = stage_dir(data, tmp_path / "stage", when="always"), []
    monkeypatch.setattr(OwnedFolder, "_note", lambda self, entries: removed.append(len(entries)))
    staged.clean()
    assert [count > 1 for count in removed] == [False, True]  # first the sign that it is whole


def test_a_folder_whose_name_is_not_utf_8_is_staged(tmp_path):
    folder = tmp_path / os.fsdecode(b"dat\xff")
    folder.mkdir()
    (folder / "a").write_bytes(b"x")
    with stage_dir(folder, tmp_path / "stage", when="always") as staged:
        same(folder, staged.path)
