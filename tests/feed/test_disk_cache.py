"""The disk tier: found again, refused when stale, never served half, and given up when the disk is full."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fulltilt import feed
from fulltilt.errors import MachineError, UsageError
from fulltilt.feed import disk_cache, sample_cache, tiers
from fulltilt.feed.disk_cache import (
    FORMAT,
    HEADER_BYTES,
    PARTIAL,
    SUB_FOLDER,
    default_cache_dir,
    list_caches,
    open_cache,
    sweep,
)
from fulltilt.feed.sample_layout import layout_of
from fulltilt.store.owned_folder import OwnedFolder

from .conftest import Pixels


class Files:
    """One number in each file, times a factor: files, arguments and code all matter."""

    def __init__(self, root, factor=1):
        self.root = root
        self.paths = sorted(str(path) for path in root.iterdir())
        self.factor = factor
        self.reads = 0

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with Path(self.paths[index]).open() as file:
            return torch.full((64,), int(file.read()) * self.factor)


@pytest.fixture
def files(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    for number in range(12):
        (root / f"{number:02}.txt").write_text(str(number))
    return root


def run(dataset, cache_dir, epochs=1, **options):
    options = {"cache_key": f"v{getattr(dataset, 'factor', 1)}", **options}
    with feed.loader(dataset, 4, residency="disk", cache_dir=cache_dir, num_workers=0, **options) as loader:
        served = [torch.cat(list(loader)) for _ in range(epochs)]
    return served, loader


def opened(loader):
    return next(note for note in loader.notes if note.startswith("residency"))


def test_the_next_run_finds_the_cache(files, cache_dir):
    first, loader = run(Files(files), cache_dir, 2)
    assert "cache new" in opened(loader)
    (entry,) = list_caches(cache_dir)
    assert entry.complete
    assert not entry.in_use
    second, loader = run(Files(files), cache_dir)
    assert "cache found" in opened(loader)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[0])


def test_a_cache_of_another_key_is_another_cache(files, cache_dir):
    run(Files(files), cache_dir)
    served, loader = run(Files(files, factor=3), cache_dir)
    assert "cache new" in opened(loader)
    assert served[0][1, 0] == 3
    assert len(list_caches(cache_dir)) == 2
    assert "cache found" in opened(run(Files(files), cache_dir)[1])


def test_without_a_key_a_cache_lives_for_one_run(files, cache_dir):
    served, loader = run(Files(files), cache_dir, 2, cache_key=None)
    assert "for this run only" in opened(loader)
    assert torch.equal(served[1], torch.stack([Files(files)[i] for i in range(12)]))
    assert list_caches(cache_dir) == []


def test_without_a_key_nobody_is_given_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "memory_headroom_bytes", lambda: 0)
    for key, tier in ((None, "none"), ("v1", "disk")):
        with feed.loader(Pixels(9), 4, cache_dir=tmp_path, num_workers=0, cache_key=key, device="cpu") as loader:
            assert sum(len(labels) for _, labels in loader) == 9
            assert loader.tier == tier


def test_a_damaged_row_of_a_complete_cache_is_not_served(files, cache_dir):
    """A bit that has turned on the disk, in a row that is not among those drawn anew for comparison."""
    run(Files(files), cache_dir, checks=2)
    (entry,) = list_caches(cache_dir)
    with entry.path.open("r+b") as cache:
        cache.seek(-9 * 512, os.SEEK_END)
        cache.write(b"\xff")
    served, loader = run(Files(files), cache_dir, checks=2)
    assert "the one there was damaged in its sample 3" in opened(loader)
    assert torch.equal(torch.cat(served), torch.stack([Files(files)[i] for i in range(len(Files(files)))]))
    assert "found" in opened(run(Files(files), cache_dir, checks=2)[1])


def write_other_rows(path):
    with path.open("r+b") as cache:
        cache.seek(HEADER_BYTES)
        cache.write(zlib.crc32(b"\xff" * 512).to_bytes(4, "little"))
        cache.seek(-12 * 512, os.SEEK_END)
        cache.write(b"\xff" * 512)


def test_a_cache_that_lies_is_refused(files, cache_dir):
    """Same files and code as far as anybody can see, and yet other rows: compared with the data set itself."""
    run(Files(files), cache_dir)
    (entry,) = list_caches(cache_dir)
    write_other_rows(entry.path)
    served, loader = run(Files(files), cache_dir)
    assert any("the cache was refused: its sample 0" in note for note in loader.notes)
    assert served[0][0, 0] == 0


def test_a_complete_cache_may_lie_where_nothing_can_be_written(files, cache_dir, monkeypatch):
    run(Files(files), cache_dir)
    opened_files = os.open

    def read_only(path, flags, *rest, **options):
        if flags & (os.O_RDWR | os.O_WRONLY) and ("dir_fd" in options or str(path).startswith(str(cache_dir))):
            raise PermissionError(13, "Permission denied")
        return opened_files(path, flags, *rest, **options)

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "utime", refused)
    served, loader = run(Files(files), cache_dir)
    assert "cache found" in opened(loader)
    assert torch.equal(served[0], torch.stack([Files(files)[i] for i in range(12)]))


def test_nobody_who_did_not_ask_for_the_disk_is_stopped_by_it(tmp_path, monkeypatch):
    """A folder that cannot be made: residency auto goes on from the source."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sample_cache, "measure_free_bytes", lambda *_, **__: {"ram": 0, "disk": 1 << 30})
    with feed.loader(Pixels(9), 4, cache_key="v1", cache_dir=tmp_path / "file" / "x", num_workers=0) as loader:
        assert sum(len(labels) for _, labels in loader) == 9
    assert "training goes on from the source" in opened(loader)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_fails_otherwise_does_not_stop_training_either(files, cache_dir, monkeypatch, caplog, call):
    def failing(*_):
        raise OSError(5, "Input/output error")

    OwnedFolder.claim(cache_dir, "cache")
    monkeypatch.setattr(os, "pwrite" if call == "write" else "fsync", failing)
    served, loader = run(Files(files), cache_dir, 2)
    assert loader.tier == "none"
    assert "Input/output error" in caplog.text
    assert torch.equal(served[1], torch.stack([Files(files)[i] for i in range(12)]))


def test_foreign_folders_survive_feeding_and_clearing(files, cache_dir):
    """Old folders with a user's own data, one of them named as older versions named what they were making."""
    theirs = [cache_dir / "weights.new", cache_dir / "run-1.partial", cache_dir / "plain"]
    for folder in theirs:
        folder.mkdir(parents=True)
        (folder / "cache.json").write_text("{}")
        os.utime(folder, (1, 1))
    run(Files(files), cache_dir)
    assert (cache_dir / SUB_FOLDER).stat().st_mode & 0o777 == 0o700
    assert "1 of 1 caches removed" in command("clear", "--dir", str(cache_dir)).stdout
    assert all((folder / "cache.json").exists() for folder in theirs)


def test_a_foreign_folder_among_our_caches_stays(files, cache_dir):
    run(Files(files), cache_dir)
    theirs = cache_dir / "weights.new"
    theirs.mkdir()
    os.utime(theirs, (1, 1))
    run(Files(files, factor=2), cache_dir)
    assert "2 of 2 caches removed" in command("clear", "--dir", str(cache_dir)).stdout
    assert theirs.exists()


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_no_link_in_the_place_of_a_cache_is_written_through(files, cache_dir, tmp_path, link, partial):
    victim = tmp_path / "victim"
    victim.write_bytes(b"x" * 12 * 512)
    iterator, loader = start(Files(files), cache_dir)
    if not partial:
        list(iterator)
    (entry,) = list_caches(cache_dir)
    iterator.close()
    loader.close()
    entry.path.unlink()
    link(victim, entry.path)
    served, loader = run(Files(files), cache_dir)
    assert torch.equal(served[0], torch.stack([Files(files)[i] for i in range(12)]))
    assert victim.read_bytes() == b"x" * 12 * 512
    assert "found" not in opened(loader)


def start(dataset, cache_dir):
    loader = feed.loader(dataset, 4, cache_key="v1", residency="disk", cache_dir=cache_dir, num_workers=0)
    iterator = iter(loader)
    next(iterator)
    return iterator, loader


def test_a_folder_open_to_all_gets_a_private_sub_folder(files, cache_dir, tmp_path):
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    run(Files(files), cache_dir)
    assert os.listdir(cache_dir) == [SUB_FOLDER]
    (cache_dir / SUB_FOLDER).rename(tmp_path / "elsewhere")
    (cache_dir / SUB_FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MachineError, match="only this user may write"):
        run(Files(files), cache_dir)


def test_what_killed_runs_left_is_swept(files, cache_dir):
    run(Files(files), cache_dir)
    owned = OwnedFolder(cache_dir)
    for name in ("run-77-ab.partial", "cut-short.partial"):
        os.close(owned.create(name))
    assert sweep(cache_dir) == 2
    assert sorted(os.listdir(cache_dir)) == sorted([".fulltilt", list_caches(cache_dir)[0].path.name])


def cut_rows(path):
    os.truncate(path, HEADER_BYTES + 100)


def header_of(path):
    return json.loads(path.read_bytes()[:HEADER_BYTES].rstrip(b"\0"))


def write_header(path, header):
    with path.open("r+b") as cache:
        cache.write(header.encode().ljust(HEADER_BYTES, b"\0"))


def other_samples(path):
    write_header(path, json.dumps({**header_of(path), "samples": -3}))


def deep_header(path):
    write_header(path, "[" * HEADER_BYTES)


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("poison", [cut_rows, other_samples, deep_header, a_pipe, a_folder])
def test_a_poisoned_cache_is_never_served(files, cache_dir, poison):
    run(Files(files), cache_dir)
    (entry,) = list_caches(cache_dir)
    poison(entry.path)
    served, loader = run(Files(files), cache_dir)
    assert torch.equal(served[0], torch.stack([Files(files)[i] for i in range(12)]))
    assert "cache new" in opened(loader) or "not made by Fulltilt" in opened(loader)


def test_foreign_rows_that_cannot_be_deleted_are_not_served(files, cache_dir, tmp_path):
    """A complete cache with valid checksums and other rows, copied into the folder by hand."""
    run(Files(files), cache_dir)
    (entry,) = list_caches(cache_dir)
    shutil.copy(entry.path, tmp_path / "copy")
    write_other_rows(tmp_path / "copy")
    assert OwnedFolder(cache_dir).remove(entry.path)
    (tmp_path / "copy").rename(entry.path)
    served, loader = run(Files(files), cache_dir)
    assert served[0][0, 0] == 0
    assert loader.tier == "none"
    assert entry.path.exists()


def test_without_a_home_the_cache_lies_in_a_temporary_folder(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "FULLTILT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a number without an entry in passwd
    assert default_cache_dir().is_relative_to(tempfile.gettempdir())


def _run_pixels(dataset, cache_dir):
    with feed.loader(dataset, 4, residency="disk", cache_dir=cache_dir, num_workers=0) as loader:
        served = [torch.cat([image for image, _ in loader]) for _ in range(2)]
    return served, loader


class Slow:
    """A sample takes as long as the environment says: the same data set in both runs."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        time.sleep(float(os.environ["PAUSE_S"]))
        return torch.full((5000,), index)


def train(cache_dir, say):
    with feed.loader(
        Slow(), 4, cache_key="v1", residency="disk", cache_dir=cache_dir, num_workers=2, checks=2
    ) as loader:
        for _ in range(2):
            for number, batch in enumerate(loader):
                assert bool((batch == batch[:, :1]).all())
                assert batch[:, 0].tolist() == list(range(number * 4, number * 4 + 4))
                say(number)
        return opened(loader)


def to_be_killed(cache_dir, say):
    os.setsid()
    train(cache_dir, say.send)


def test_killed_while_writing_and_run_again(cache_dir, monkeypatch):
    monkeypatch.setenv("PAUSE_S", "0.03")
    context = multiprocessing.get_context("fork")
    heard, say = context.Pipe(duplex=False)
    process = context.Process(target=to_be_killed, args=(cache_dir, say))
    process.start()
    say.close()
    while heard.recv() != 6:
        pass
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    (entry,) = list_caches(cache_dir)
    assert not entry.complete
    monkeypatch.setenv("PAUSE_S", "0")
    assert "cache new" in train(cache_dir, lambda number: None)
    (entry,) = list_caches(cache_dir)
    assert entry.complete


@contextmanager
def largest_file(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("prefetches", [False, True])
def test_a_disk_that_fills_up_while_caching_does_not_stop_training(cache_dir, caplog, prefetches):
    dataset = Pixels(40)
    with feed.loader(dataset, 4, residency="disk", cache_dir=cache_dir, num_workers=2, shuffle=True) as loader:
        loader._device_batches.copies_ahead = prefetches
        loader._cache.settle(model_has_run=True)
        with largest_file(HEADER_BYTES + 20 * 448):  # half of the rows
            for _ in range(2):
                served = list(loader)
                assert sorted(int(label) for _, labels in served for label in labels) == list(range(40))
                for images, labels in served:
                    for image, label in zip(images, labels, strict=True):
                        assert torch.equal(image, dataset[int(label)][0])
        assert loader.tier == "none"
    assert "training goes on from the source" in caplog.text
    assert list_caches(cache_dir) == []


def test_a_disk_without_room_at_the_start_does_not_stop_training(cache_dir):
    with largest_file(1000):
        served, loader = _run_pixels(Pixels(40), cache_dir)
    assert "training goes on from the source" in opened(loader)
    assert torch.equal(served[0], torch.stack([Pixels(40)[i][0] for i in range(40)]))


def test_a_new_cache_takes_no_more_than_half_of_the_free_disk(files, cache_dir, monkeypatch):
    need = 12 * (64 * 8 + 4)
    monkeypatch.setattr(disk_cache, "free_disk_bytes", lambda _: 2 * need)
    assert "cache new" in opened(run(Files(files), cache_dir)[1])
    (kept,) = list_caches(cache_dir)
    monkeypatch.setattr(disk_cache, "free_disk_bytes", lambda _: 2 * need - 2)
    assert "cache found" in opened(run(Files(files), cache_dir)[1]), "the one that is there needs none"
    _, loader = run(Files(files, factor=2), cache_dir)
    assert "more than half of the" in opened(loader)
    assert loader.tier == "none"
    assert [entry.path for entry in list_caches(cache_dir)] == [kept.path]


def test_two_ranks_fill_one_cache(files, cache_dir):
    dataset = Files(files)
    layout = layout_of(dataset[0])
    left, _ = open_cache(cache_dir, "Files", layout, 12)
    right, how = open_cache(cache_dir, "Files", layout, 12)
    assert how == "shared with other processes"
    rows = torch.zeros(12, layout.row_bytes, dtype=torch.uint8)
    for index in range(12):
        layout.pack(dataset[index], rows[index])
    even, odd = torch.arange(0, 12, 2), torch.arange(1, 12, 2)
    left.write(even, rows[even])
    assert not left.finish()
    right.write(odd, rows[odd])
    assert bool(left.has(odd).all())
    assert right.finish()
    assert left.finish()
    assert torch.equal(left.rows, rows)
    left.close()
    right.close()
    (entry,) = list_caches(cache_dir)
    assert entry.complete
    assert not list(cache_dir.glob("*" + PARTIAL))


def test_a_cache_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        feed.loader(Pixels(4), 2, residency="disk", cache_dir=tmp_path / "file" / "x", num_workers=0) as loader,
        pytest.raises(MachineError, match="cannot write into"),
    ):
        list(loader)


# --------------------------------------------------------------------------- fulltilt cache


def command(*arguments):
    import typer

    from fulltilt.cli.main import add_command

    app = typer.Typer()
    app.callback()(lambda: None)
    add_command(app, "cache")
    return CliRunner().invoke(app, ["cache", *arguments])


def test_the_cache_command_lists_and_clears(files, cache_dir):
    where = ("--dir", str(cache_dir))
    assert "no caches" in command("list", *where).stdout
    run(Files(files), cache_dir)
    listed = command(*where).stdout
    assert "complete" in listed
    assert "Files" in listed
    (found,) = json.loads(command("list", "--json", *where).stdout)["caches"]
    assert found["samples"] == 12
    assert found["complete"] is True
    assert "0 of 0" in command("clear", "--name", "other", *where).stdout
    with feed.loader(Files(files), 4, cache_key="v1", residency="disk", cache_dir=cache_dir, num_workers=0) as loader:
        next(iter(loader))
        assert "in use by a running job" in command("clear", *where).stdout
    assert "1 of 1 caches removed" in command("clear", *where).stdout
    assert list_caches(cache_dir) == []
    assert isinstance(command("burn", *where).exception, UsageError)


def test_odd_caches_do_no_harm_and_are_shown_escaped(cache_dir):
    odd = {"a": "{}", "b": "[1]", "c": "{", "d": json.dumps({"format": FORMAT, "label": "", "samples": "many"})}
    named = json.dumps({"format": FORMAT, "label": "Files /data/\x1b[31m\udcff\n", "samples": 3})
    owned = OwnedFolder.claim(cache_dir, "cache")
    for name, header in {**odd, "f\x1b[2J\n": named}.items():
        owned.write(name, header.encode())
    (cache_dir / "file").write_text("")
    listed = command("list", "--dir", str(cache_dir))
    assert listed.exit_code == 0, listed.exception
    assert "Files /data/\ufffd[31m\ufffd" in listed.stdout
    assert "f\ufffd[2J" in listed.stdout
    assert "\x1b" not in listed.stdout
    cleared = command("clear", "--dir", str(cache_dir)).stdout
    assert "1 of 1 caches removed" in cleared  # the one with a header that reads
    assert "4 unfinished caches of killed jobs removed" in cleared
    assert command("list", "--dir", str(cache_dir / "file")).exit_code == 0
    assert (cache_dir / "file").exists()


def test_control_characters_in_names_reach_no_terminal(files, tmp_path):
    where = tmp_path / "caches\x1b]0;owned\x07\u202e"
    run(Files(files), where)
    (entry,) = list_caches(where)
    evil = entry.path.with_name("\x1b[2J\x9b31m\rnone")
    OwnedFolder(where).move(entry.path, evil)
    write_header(evil, json.dumps({**header_of(evil), "label": "\x1b]0;data\x07\nsecond line"}))
    OwnedFolder(where).record(evil)
    assert list_caches(where)[0].path == evil
    for arguments in ((), ("list", "--json"), ("clear", "--name", "nothing"), ("clear",), ()):
        shown = command(*arguments, "--dir", str(where)).stdout
        assert all(character.isprintable() or character == "\n" for character in shown), ascii(shown)
    assert list_caches(where) == []


@pytest.mark.parametrize("closed", [False, True])
def test_a_loader_that_is_gone_holds_no_file(closed, tmp_path):
    loader = feed.loader(
        Pixels(8), 4, residency="disk", cache_dir=tmp_path / "cache", cache_key="a", num_workers=0, device="cpu"
    )
    list(loader)
    fd = loader._cache.store._fd
    held = Path(f"/proc/self/fd/{fd}")
    assert str(tmp_path) in str(held.readlink())
    if closed:
        loader.close()
    del loader
    gc.collect()
    assert not os.path.lexists(held) or str(tmp_path) not in str(held.readlink())
