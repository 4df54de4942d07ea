"""The disk tier: decoded rows in a mapped file that the next run finds again, and the folder of such files.

    <cache>/<key>.partial    while it is being written; the ranks of a job write it together
    <cache>/<key>            complete; renamed, so that it exists fully or not at all

A cache for one run is unlinked as soon as it is made: the system frees it when the process ends.
A file holds a header (JSON), one checksum for each row (0 means missing), and the packed rows. What a killed job
leaves unfinished is deleted.

The folder is an ``OwnedFolder``: only what its marker lists is written or removed, and no link is followed.

Rows are written with ``pwrite``, not through the mapping, where a full disk would end the process with SIGBUS. A row
counts once its checksum is written, after it. Several processes may write at once: they write the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import stat
import tempfile
import warnings
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.feed.epoch_order import spread
from fulltilt.feed.sample_layout import Layout
from fulltilt.feed.sample_store import Store, memory_of
from fulltilt.figures import size as in_words
from fulltilt.store.owned_folder import MARKER, OwnedFolder, is_private, kind_of

FORMAT = 2
PARTIAL = ".partial"
KIND = "cache"
# Used where the folder asked for holds other files, or others may write into it.
SUB_FOLDER = "fulltilt-cache"
HEADER_BYTES = 16 * 1024  # whole pages, on every machine
# How much of a complete cache is compared with its checksums: a quarter of a second, and all of a small one.
CHECKED_BYTES, CHECKED_ROWS = 256 * 1024**2, 10_000


class CacheFull(Exception):  # noqa: N818 - an event; the job goes on without the cache
    """No room is left for the cache; the message says where and how much was needed."""


@dataclass(frozen=True)
class CacheEntry:
    """One cache on disk, as ``fulltilt cache list`` shows it."""

    path: Path
    label: str
    samples: int
    size_bytes: int
    complete: bool
    used_at_s: float
    in_use: bool


# --------------------------------------------------------------------------- the folder of all caches


def default_cache_dir() -> Path:
    """FULLTILT_CACHE_DIR, or fulltilt/feed in the user's cache folder."""
    named = os.environ.get("FULLTILT_CACHE_DIR")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.home may raise
    if home.startswith("~"):  # a user without a home, as containers run them
        home = tempfile.gettempdir()
    return Path(home) / "fulltilt" / "feed"


def folder_of_caches(cache_dir: Path) -> Path:
    """The folder of caches: ``cache_dir`` itself if it is new, empty or Fulltilt's, else a sub-folder."""
    try:
        names = [entry.name for entry in cache_dir.iterdir() if not entry.name.startswith(MARKER + ".")]
    except OSError:  # missing or not readable: claiming it raises the error
        return cache_dir
    ours = MARKER in names and kind_of(cache_dir) == KIND
    return cache_dir if is_private(cache_dir) and (ours or not names) else cache_dir / SUB_FOLDER


def _claim(cache_dir: Path) -> OwnedFolder:
    folder = folder_of_caches(cache_dir)
    if folder == cache_dir:
        return OwnedFolder.claim(folder, KIND, flag="cache_dir", mode=0o755)
    return OwnedFolder.claim_private(folder, KIND, flag="cache_dir")


def _owned(cache_dir: Path) -> OwnedFolder | None:
    """The folder of caches if it is Fulltilt's already; nothing is made."""
    folder = folder_of_caches(cache_dir)
    return OwnedFolder(folder) if is_private(folder, follow=folder == cache_dir) and kind_of(folder) == KIND else None


def list_caches(cache_dir: Path) -> list[CacheEntry]:
    """All caches for ``cache_dir``, the most recently used first."""
    owned = _owned(cache_dir)
    entries = [entry for name in owned.entries() if (entry := _read_entry(owned.path / name))] if owned else []
    return sorted(entries, key=lambda entry: -entry.used_at_s)


def remove(entry: CacheEntry) -> bool:
    """Delete a cache; False if a job uses it, if it is not Fulltilt's, or if that is not permitted."""
    now = _read_entry(entry.path)
    return not (now and now.in_use) and OwnedFolder(entry.path.parent).remove(entry.path)


def sweep(cache_dir: Path) -> int:
    """Delete unfinished caches of killed runs and caches of other versions; returns how many."""
    owned = _owned(cache_dir)
    if owned is None:
        return 0
    with owned.locked("", wait=True):
        return _sweep(owned)


def _sweep(owned: OwnedFolder) -> int:
    """The caller has the lock, under which caches are made."""
    removed = 0
    for name in owned.entries():
        entry = _read_entry(owned.path / name)
        if entry is None or not (entry.complete or entry.in_use):
            removed += owned.remove(name)
    return removed


def free_for_caches(cache_dir: Path) -> int | None:
    """Half of the free disk, plus the caches there: the one wanted may be among them; None if not known."""
    free = free_disk_bytes(cache_dir)
    return None if free is None else free // 2 + sum(entry.size_bytes for entry in list_caches(cache_dir))


def free_disk_bytes(folder: Path) -> int | None:
    """Free bytes of the file system of ``folder``, which need not exist; None if not known."""
    for existing in (folder, *folder.parents):
        try:
            return shutil.disk_usage(existing).free
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
    return None


def _read_entry(path: Path) -> CacheEntry | None:
    try:
        with open(_open_file(path, os.O_RDONLY), "rb") as file:
            status, header = os.fstat(file.fileno()), json.loads(file.read(HEADER_BYTES).rstrip(b"\0"))
            label, samples, in_use = str(header["label"]), header["samples"], _is_locked(file.fileno())
        if header["format"] != FORMAT or type(samples) is not int:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    # Blocks, not length: a half-written file is sparse.
    size, complete = status.st_blocks * 512, not path.name.endswith(PARTIAL)
    return CacheEntry(path, label, samples, size, complete, status.st_mtime, in_use)


def _open_file(path: Path, flags: int) -> int:
    """A descriptor of a plain file. Raises OSError for symbolic and hard links."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file of its own")
    return fd


def _is_locked(fd: int) -> bool:
    """Whether a process has the cache open, and so holds a shared lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the descriptor
    except OSError:
        return True
    return False


# --------------------------------------------------------------------------- one cache


class DiskStore(Store):
    """Rows of one data set in a mapped file. Raises OSError, and CacheFull when the disk is full."""

    def __init__(self, owned: OwnedFolder, name: str, samples: int, row_bytes: int) -> None:
        self.complete = not name.endswith(PARTIAL)
        self._owned, self._name, self._row_bytes = owned, name, row_bytes
        # A complete cache may be read-only for this user.
        self._fd = _open_file(self.path, os.O_RDONLY if self.complete else os.O_RDWR)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH)  # waits for `_is_locked`
            self._rows_at, size = _places(samples, row_bytes)
            if os.fstat(self._fd).st_size != size:
                raise OSError(errno.EINVAL, "cut short")
            mapped = _mapped(self._fd, size)
        except (OSError, ValueError):
            os.close(self._fd)
            raise
        self._close = weakref.finalize(self, os.close, self._fd)
        self._marks = mapped[HEADER_BYTES : HEADER_BYTES + samples * 4].view(torch.int32)
        super().__init__(mapped[self._rows_at :].view(samples, row_bytes), self._marks)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._owned.path / self._name

    def has(self, indices: torch.Tensor) -> torch.Tensor:
        """Which of ``indices`` are there, also those written by other ranks."""
        return self._marks[indices] != 0

    def write(self, indices: torch.Tensor, rows: torch.Tensor, places: torch.Tensor | None = None) -> None:  # noqa: ARG002
        """Write rows, then their checksums. Raises CacheFull."""
        try:
            for position, index in enumerate(indices.tolist()):
                data = memory_of(rows[position])
                _write_fully(self._fd, data, self._rows_at + index * self._row_bytes)
                _write_fully(self._fd, _mark(data).to_bytes(4, "little"), HEADER_BYTES + index * 4)
        except OSError as error:
            raise CacheFull(f"{self._owned.path} cannot be written ({error.strerror})") from error

    def finish(self) -> bool:
        """Make a fully written cache permanent; False while rows are missing."""
        if self.complete or bool((self._marks == 0).any()):
            return self.complete
        try:
            os.fsync(self._fd)
            self._make_permanent()
        except (OSError, FulltiltError) as error:
            why = error.what if isinstance(error, FulltiltError) else error.strerror
            raise CacheFull(f"{self._owned.path} cannot be written ({why})") from error
        self.complete = True
        return True

    def _make_permanent(self) -> None:
        final = self._name.removesuffix(PARTIAL)
        with self._owned.locked("", wait=True):
            if not os.path.lexists(self._owned.path / final) and self._owned.owns(self._name):
                self._owned.move(self._name, final, growing=True)  # its time says when it was last used
        if os.path.lexists(self._owned.path / final):  # else it was cleared; its rows can still be read
            self._name = final

    def first_damaged(self) -> int | None:
        """A row that fails its checksum, among as many as can be read in a moment."""
        samples, row_bytes = self.rows.shape
        for index in spread(samples, max(1, min(CHECKED_ROWS, CHECKED_BYTES // row_bytes))):
            if int(self._marks[index]) & 0xFFFFFFFF != _mark(memory_of(self.rows[index])):
                return index
        return None

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._close()

    def delete_file(self) -> bool:
        """Delete the file; its rows can be read until it is closed. False when it is not ours."""
        return self._owned.remove(self._name)


def open_cache(
    cache_dir: Path,
    label: str,
    layout: Layout,
    samples: int,
    *,
    keep: bool = True,
) -> tuple[DiskStore, str]:
    """The cache of the data set ``label``, and whether it was found, shared or new, in words.

    ``keep`` False: a new one, for this run only. Raises CacheFull if it does not fit or a foreign file has its name,
    UsageError or MachineError if the folder cannot be written.
    """
    owned = _claim(cache_dir)
    named = repr((FORMAT, label, layout.describe(), samples)).encode("utf-8", "surrogateescape")
    name = hashlib.blake2b(named, digest_size=16).hexdigest() if keep else f"run-{os.urandom(8).hex()}"
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(PermissionError):  # a read-only folder needs no lock
                stack.enter_context(owned.locked("", wait=True))
            store, how = _find(owned, name, layout, samples)
            if store is None:
                _sweep(owned)
                need, free = samples * (layout.row_bytes + 4), free_disk_bytes(owned.path)
                if free is not None and need > free // 2:
                    raise CacheFull(
                        f"a new cache of {in_words(need)} is more than half of the {in_words(free)} free in "
                        f"{owned.path}; `fulltilt cache clear` makes room"
                    )
                _create(owned, name + PARTIAL, label, layout, samples)
                store = DiskStore(owned, name + PARTIAL, samples, layout.row_bytes)
                if not keep:
                    store.delete_file()
            return store, how
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CacheFull(f"{owned.path} is full ({error.strerror})") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            told = f"the cache folder {owned.path} cannot be written: {error.strerror}"
            raise UsageError(told, "Set cache_dir.") from error
        raise FulltiltError(f"the cache in {owned.path} cannot be written: {error.strerror}") from error


def _find(owned: OwnedFolder, final: str, layout: Layout, samples: int) -> tuple[DiskStore | None, str]:
    """The complete cache of this name, or the one that other ranks are writing; useless ones are deleted."""
    how = "new"
    for name in (final, final + PARTIAL):
        path, entry = owned.path / name, _read_entry(owned.path / name)
        if entry and entry.samples == samples and (entry.complete or (entry.in_use and owned.owns(name))):
            with contextlib.suppress(OSError, ValueError):
                store = DiskStore(owned, name, samples, layout.row_bytes)
                if not entry.complete:
                    return store, "shared with other processes"
                if (damaged := store.first_damaged()) is None:
                    with contextlib.suppress(OSError):  # of another user
                        os.utime(store._fd)
                    return store, "found"
                store.delete_file()
                store.close()
                how = f"new; the one there was damaged in its sample {damaged}"
        if not owned.remove(name):
            raise CacheFull(f"{path} was not made by Fulltilt and is left as it is")
    return None, how


def _create(owned: OwnedFolder, name: str, label: str, layout: Layout, samples: int) -> None:
    header = {"format": FORMAT, "label": label[:1000], "samples": samples}
    fd = owned.create(name)
    try:
        os.truncate(fd, _places(samples, layout.row_bytes)[1])
        os.write(fd, json.dumps(header).encode())
    except OSError:
        owned.remove(name)
        raise
    finally:
        os.close(fd)


# --------------------------------------------------------------------------- bytes


def _places(samples: int, row_bytes: int) -> tuple[int, int]:
    """Where the rows begin in the file, at a page, and its size."""
    rows_at = -(-(HEADER_BYTES + samples * 4) // HEADER_BYTES) * HEADER_BYTES
    return rows_at, rows_at + samples * row_bytes


def _mapped(fd: int, size: int) -> torch.Tensor:
    """The file as bytes. It is only read, but torch has no read-only tensors, and warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ), dtype=torch.uint8)


def _mark(data: memoryview) -> int:
    return zlib.crc32(data) or 1  # 0 means that the row is not there


def _write_fully(fd: int, data: bytes | memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
