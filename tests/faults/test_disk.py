"""A disk that is full, limited, closed or wrong, and a writer that fails."""

from __future__ import annotations

import csv
import errno
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fulltilt import feed, store
from fulltilt.errors import DoesNotFit, MachineError
from fulltilt.feed.disk_cache import list_caches
from fulltilt.train import checkpoint, checkpoint_format
from fulltilt.train.checkpoint import KeepPolicy, Writer, newest_complete
from tests.faults import victim
from tests.faults.victim import Order
from tests.train.test_checkpoint import claimed, snapshot


def assert_clear(out: Path, *words: str) -> None:
    """At most three lines, no traceback, and what they must say."""
    errors = (out / "stderr.0.txt").read_text()
    assert "Traceback" not in errors
    assert 1 <= len(errors.splitlines()) <= 3, errors
    for word in words:
        assert word in errors, errors


def fill_the_disk(order: Order) -> None:
    """From the second checkpoint on, the file system has no room: os.write says so after half the bytes."""
    real, made = os.write, []
    mkdir = Path.mkdir

    def counting_mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.name.startswith(".step-"):
            made.append(self)
        mkdir(self, *args, **kwargs)

    def full(fd: int, data: Any) -> int:
        if len(made) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    Path.mkdir = counting_mkdir  # type: ignore[method-assign]
    os.write = full


@pytest.mark.slow
def test_disk_full(tmp_path: Path) -> None:
    """Seen to fail: without the `except OSError` of `durable.write_file` the message has no byte counts."""
    assert victim.exit_code(Order(tmp_path, prepare=fill_the_disk)) == 7
    assert_clear(tmp_path, "No space left", "bytes needed", "free)", "step-00000003; the same command resumes there")
    found = newest_complete(tmp_path / "checkpoints")
    assert found.checkpoint is not None
    assert found.checkpoint.step == 3
    assert not list((tmp_path / "checkpoints").glob(".*.tmp"))
    assert victim.exit_code(Order(tmp_path)) == 0


def test_a_really_full_file_system(tmp_path: Path) -> None:
    """A tmpfs of 64 KiB with room for one checkpoint. Seen to fail like the test above."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        root = claimed(small / "out")
        checkpoint.write(root, snapshot(1, size=2000))
        with pytest.raises(MachineError, match=r"No space left on device \([\d,]+ bytes needed, [\d,]+ free\)"):
            checkpoint.write(root, snapshot(2, size=20000))
        assert [path.name for path in root.iterdir()] == ["step-00000001"]
        checkpoint.load(root / "step-00000001")
    finally:
        subprocess.run(["umount", small], check=True)


def limit_file_size(order: Order) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (order.note, order.note))


def test_file_size_limit_is_seen_before_step_0(tmp_path: Path) -> None:
    """Seen to fail: without `_check_file_size_limit` the run trains until its first save."""
    assert victim.exit_code(Order(tmp_path, prepare=limit_file_size, note=8192)) == 7
    assert_clear(tmp_path, "file-size limit", "ulimit -f")
    assert victim.chain(tmp_path) == {}


def test_file_size_limit_met_while_writing(tmp_path: Path) -> None:
    """Seen to fail: with `write_file` catching only ENOSPC the process ends with a traceback."""
    root = claimed(tmp_path)
    checkpoint.write(root, snapshot(1))
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            checkpoint.write(root, snapshot(2, size=5000))
        except MachineError as error:
            os._exit(7 if "file-size limit" in error.what else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert [path.name for path in root.iterdir()] == ["step-00000001"]


def become_nobody(order: Order) -> None:
    if os.getuid() == 0:
        for path in (order.out, *order.out.iterdir()):
            os.chown(path, 65534, 65534)
        os.setgid(65534)
        os.setuid(65534)
    (order.out / "checkpoints").chmod(0o500)


def test_folder_not_writable(tmp_path: Path) -> None:
    """Seen to fail: without the probe in `checkpoint.prepare` the run trains until its first save."""
    out = claimed(tmp_path / "out").parent
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    assert victim.exit_code(Order(out, prepare=become_nobody)) == 7
    assert_clear(out, "cannot write", "checkpoints", "--out")
    assert victim.chain(out) == {}


def damage(folder: Path, how: str) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    if how == "cut":
        del content[len(content) // 2 :]
    else:
        content[-3] ^= 1  # in the last weight, not in the header
    file.write_bytes(content)


@pytest.mark.parametrize("how", ["cut", "flip"])
def test_damaged_checkpoint(how: str, tmp_path: Path) -> None:
    """Seen to fail: with the comparisons of size and checksum in `verify` removed, the cut file ends the run with an
    error of the tensor library, and the flipped bit trains on silently (the chain differs)."""
    whole = victim.run_here(tmp_path / "whole")
    victim.run_here(tmp_path / "out", stop_at=11)
    damage(tmp_path / "out" / "checkpoints" / "step-00000009", how)
    resumed = victim.run_here(tmp_path / "out")
    assert min(resumed) == 7
    assert resumed == {step: whole[step] for step in resumed}
    shown = (tmp_path / "out.txt").read_text()
    assert "step-00000009 is refused" in shown
    assert "3 steps are lost" in shown


class BrokenWriter:
    """The writer raises at the second checkpoint."""

    def __init__(self) -> None:
        self.real, self.calls = checkpoint.write, 0

    def __call__(self, root: Path, snapshot: checkpoint.Snapshot) -> checkpoint.Checkpoint:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("the storage driver is confused")
        return self.real(root, snapshot)


def break_the_writer(order: Order) -> None:
    checkpoint.write = BrokenWriter()


def test_background_save_fails(tmp_path: Path) -> None:
    """Seen to fail: without the `result` of `Writer.wait` the run ends with code 0."""
    assert victim.exit_code(Order(tmp_path, prepare=break_the_writer)) == 7
    assert_clear(tmp_path, "the checkpoint was not written", "the storage driver is confused")
    assert max(victim.chain(tmp_path)) <= 8, "the error must reach the loop within a step or the next save"


def break_the_last_save(order: Order) -> None:
    real = checkpoint.write

    def write(root: Path, snapshot: checkpoint.Snapshot) -> checkpoint.Checkpoint:
        if snapshot.epoch == 2:  # the save after the last evaluation, behind which no step comes
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(root, snapshot)

    checkpoint.write = write


def test_never_exit_0_without_the_last_checkpoint(tmp_path: Path) -> None:
    """Seen to fail: without the last `_wait_for_disk` in `Loop.run` the run ends with code 0."""
    assert victim.exit_code(Order(tmp_path, prepare=break_the_last_save)) == 7
    assert_clear(tmp_path, "Input/output error")


def test_a_second_ctrl_c_in_a_save_is_no_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: it was told as a checkpoint that was not written, with the code of a broken machine."""
    root = claimed(tmp_path)
    checkpoint.write(root, snapshot(1))
    monkeypatch.setattr(checkpoint_format, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Writer(root, KeepPolicy()).save(snapshot(2), background=False)
    assert [path.name for path in root.iterdir()] == ["step-00000001"]


def test_the_writer_raises_once_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = claimed(tmp_path)
    writer = Writer(root, KeepPolicy())
    monkeypatch.setattr(checkpoint_format, "write_file", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
    writer.save(snapshot(1))
    with pytest.raises(MachineError, match="gone"):
        writer.wait()
    monkeypatch.undo()
    writer.save(snapshot(2))
    writer.wait()
    assert writer.newest is not None
    assert writer.newest.step == 2


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 96 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k,mode=755", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_becomes_read_only_is_told(small: Path) -> None:
    root = claimed(small / "out")
    checkpoint.write(root, snapshot(1))
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    with pytest.raises(MachineError, match=r"cannot write .*: Read-only file system") as caught:
        checkpoint.write(root, snapshot(2))
    assert "--out" in str(caught.value)
    checkpoint.load(root / "step-00000001")


def test_quota_met_while_writing_names_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = claimed(tmp_path / "out")
    checkpoint.write(root, snapshot(1))
    real = checkpoint_format.os.write

    def over_quota(fd: int, data: Any) -> int:
        if len(data) > 100:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(fd, data)

    monkeypatch.setattr(os, "write", over_quota)
    with pytest.raises(MachineError, match=r"Disk quota exceeded \([\d,]+ bytes needed"):
        checkpoint.write(root, snapshot(2, size=20000))
    monkeypatch.undo()
    assert [path.name for path in root.iterdir() if path.name.startswith("step-")] == ["step-00000001"]


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """Twenty rows of 8 KiB: more than the small disk holds."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2048,), float(index * index))


def batches_of(cache_dir: Path) -> list[float]:
    loader = feed.loader(
        Squares(), batch_size=4, residency="disk", cache_dir=cache_dir, cache_key="v1", shuffle=False, device="cpu"
    )
    return [float(row[0]) for _ in range(2) for batch in loader for row in batch]


def test_a_cache_that_cannot_fit_is_refused_before_it_is_filled(small: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"needs 160 KiB; disk has room for .*\n.*residency='auto'"):
        batches_of(small / "cache")
    assert not [path for path in small.rglob("*") if path.is_file() and path.name != ".fulltilt"]


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_cache_refused_while_it_fills_gives_right_samples(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwrite, 0

    def refused(*given: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise OSError(number, os.strerror(number))
        return real(*given)

    monkeypatch.setattr(os, "pwrite", refused)
    assert batches_of(tmp_path / "cache") == [float(i * i) for i in range(20)] * 2
    assert calls > 9


def test_a_poisoned_cache_is_believed_only_with_right_checksums(tmp_path: Path) -> None:
    """Checksums are against damage. Whoever may write into the cache folder may write other samples."""
    right = [float(i * i) for i in range(20)] * 2
    assert batches_of(tmp_path / "cache") == right
    (entry,) = list_caches(tmp_path / "cache")
    with entry.path.open("r+b") as file:
        file.seek(-20 * 2048 * 4, os.SEEK_END)
        file.write(torch.full((2048,), 7.0).numpy().tobytes())
    assert batches_of(tmp_path / "cache") == right, "wrong bytes under the checksum of others are made anew"


def test_a_page_for_which_there_is_no_room_is_told(small: Path) -> None:
    store.create_folder(small / "run")
    with pytest.raises(MachineError, match=r"cannot write .*report.html.*No space left"):
        store.write_text(small / "run" / "report.html", "x" * 200_000)
    assert not (small / "run" / "report.html").exists()


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_changes_no_duration(
    jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = time.time, 0

    def jumping() -> float:
        nonlocal calls
        calls += 1
        return real() + jump_s * calls

    whole = victim.run_here(tmp_path / "whole")
    monkeypatch.setattr(time, "time", jumping)
    assert victim.run_here(tmp_path / "out") == whole
    with (tmp_path / "out" / "metrics.csv").open() as file:
        assert all(0 <= float(row["seconds"]) < 600 for row in csv.DictReader(file))
