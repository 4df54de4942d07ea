"""The disk tier: decoded rows in a mapped file that the next run finds again, and the folder of such caches.

    <cache>/<key>.partial/    while it is being written; a later run or another rank goes on where it stands
    <cache>/<key>/            complete; renamed as a whole, so that it exists fully or not at all
        cache.json            what it is, and what it was made for
        rows.bin              packed rows, one after the other
        marks.bin             one checksum for each row, written after the row; 0 means not there

The folder is an ``OwnedFolder``: only what its marker lists is written or removed, and no link is followed.

Rows are written with ``pwrite``, not through the mapping: a full disk is then an error that can be caught, where a
store to a mapped page would end the process with SIGBUS. A row counts when its checksum is there, and when a partial
cache is taken up again every checksum is recomputed: a row torn by a kill or a power cut is made anew.
Several processes may write at once, because they write the same bytes to the same places.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import mmap
import os
import secrets
import shutil
import stat
import tempfile
import time
import warnings
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.feed.epoch_order import spread
from fulltilt.feed.sample_layout import Layout
from fulltilt.feed.storage import HostStore
from fulltilt.store.owned_folder import MARKER, OwnedFolder, is_private, kind_of

try:
    import fcntl
except ImportError:  # Windows: caches there are not protected from a clearing command while a job uses them
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
HEADER, ROWS, MARKS = "cache.json", "rows.bin", "marks.bin"
PARTIAL, ONE_RUN = ".partial", "run-"
KIND = "cache"
# Where the folder asked for holds other files, or anybody may write into it.
SUB_FOLDER = "fulltilt-cache"
# Of a complete cache so much is compared with its checksums: a quarter of a second, and all of a small one.
CHECKED_BYTES, CHECKED_ROWS = 256 * 1024**2, 10_000
_HEADER_BYTES = 1024**2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class CacheFull(Exception):  # noqa: N818 - an event; the job goes on without the cache
    """There is no room left for the cache; the message says where and how much was needed."""


@dataclass(frozen=True)
class CacheKey:
    """What a cache was made for: ``label`` names the data set, ``made_from`` what of it (files, arguments).

    Only a ``reusable`` one is looked for by the next run.
    """

    label: str
    made_from: str
    reusable: bool

    def folder_name(self, layout: Layout, samples: int) -> str:
        """The same for equal keys, layouts and numbers of samples."""
        named = (FORMAT, self.label, self.made_from, layout.describe(), samples)
        return hashlib.blake2b(repr(named).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class CacheEntry:
    """One cache on disk, as ``fulltilt cache list`` shows it."""

    folder: Path
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
    """Where the caches of ``cache_dir`` lie: in it when it is new, empty or Fulltilt's, else in a sub-folder."""
    try:
        names = [entry.name for entry in cache_dir.iterdir() if not entry.name.startswith(MARKER + ".")]
    except OSError:  # not there, or not to be read: what is wrong is said when it is claimed
        return cache_dir
    ours = MARKER in names and kind_of(cache_dir) == KIND
    return cache_dir if is_private(cache_dir) and (ours or not names) else cache_dir / SUB_FOLDER


def _claim(cache_dir: Path) -> OwnedFolder:
    folder = folder_of_caches(cache_dir)
    if folder == cache_dir:
        return OwnedFolder.claim(folder, KIND, flag="cache_dir", mode=0o755)
    return OwnedFolder.claim_private(folder, KIND, flag="cache_dir")


def _owned(cache_dir: Path) -> OwnedFolder | None:
    """The caches' folder where it is Fulltilt's already; nothing is made."""
    folder = folder_of_caches(cache_dir)
    return OwnedFolder(folder) if is_private(folder, follow=folder == cache_dir) and kind_of(folder) == KIND else None


def list_caches(cache_dir: Path) -> list[CacheEntry]:
    """Every cache that Fulltilt has made for ``cache_dir``, the most recently used first."""
    owned = _owned(cache_dir)
    entries = [entry for name in _top_level(owned) if (entry := _read_entry(owned.path / name))] if owned else []
    return sorted(entries, key=lambda entry: -entry.used_at_s)


def remove(entry: CacheEntry) -> bool:
    """Delete a cache; False if a running job uses it, if it holds what others have put there, or if it may not be."""
    owned = OwnedFolder(entry.folder.parent)
    with _lock_alone(entry.folder) as alone:
        return alone and owned.remove(entry.folder)


def sweep(cache_dir: Path) -> int:
    """Delete what killed runs left and nobody can use; returns how many folders.

    That is caches whose making was cut short, and those that were for one run only.
    """
    owned = _owned(cache_dir)
    if owned is None:
        return 0
    with owned.locked("", wait=True):
        return _sweep(owned)


def _sweep(owned: OwnedFolder) -> int:
    """The caller has the lock: nobody is making a cache at this moment."""
    removed = 0
    for name in _top_level(owned):
        folder = owned.path / name
        if read_header(folder) is None:
            removed += owned.remove(name)
        elif name.startswith(ONE_RUN):
            with _lock_alone(folder) as alone:
                removed += alone and owned.remove(name)
    return removed


def _top_level(owned: OwnedFolder) -> list[str]:
    return [name for name in owned.entries() if "/" not in name]


def default_limit_bytes(cache_dir: Path) -> int | None:
    """The cap on all caches together: FULLTILT_CACHE_LIMIT_BYTES, or half of what the disk has left for them."""
    named = os.environ.get("FULLTILT_CACHE_LIMIT_BYTES")
    if named:
        try:
            return int(named)
        except ValueError as error:
            raise UsageError(f"FULLTILT_CACHE_LIMIT_BYTES is {named!r}, not a number of bytes") from error
    free = free_disk_bytes(cache_dir)
    return None if free is None else (free + sum(entry.size_bytes for entry in list_caches(cache_dir))) // 2


def make_room(cache_dir: Path, need_bytes: int, limit_bytes: int | None) -> None:
    """Delete the caches used longest ago until ``need_bytes`` fit below the cap and on the disk. Raises CacheFull."""
    entries = list_caches(cache_dir)
    used = sum(entry.size_bytes for entry in entries)
    free = free_disk_bytes(cache_dir)
    limits = [limit_bytes] if limit_bytes is not None else []
    limits += [used + free] if free is not None else []
    if not limits:
        return
    limit = min(limits)
    if need_bytes > limit:
        raise CacheFull(f"the cache needs {need_bytes} bytes and may take {limit}")
    for entry in reversed(entries):
        if used + need_bytes <= limit:
            return
        if remove(entry):
            used -= entry.size_bytes
    if used + need_bytes > limit:
        raise CacheFull(f"the caches in use leave no {need_bytes} bytes of the {limit} allowed")


def free_disk_bytes(folder: Path) -> int | None:
    """Free bytes of the file system that ``folder`` lies or would lie on; None if it cannot be asked."""
    for existing in (folder, *folder.parents):
        try:
            return shutil.disk_usage(existing).free
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
    return None


def read_header(folder: Path) -> dict[str, Any] | None:
    """What ``cache.json`` says; None if it cannot be read."""
    try:
        with os.fdopen(_open_file(folder, HEADER, os.O_RDONLY), "rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return header if isinstance(header, dict) else None


def _read_entry(folder: Path) -> CacheEntry | None:
    header = read_header(folder)
    if header is None:
        return None
    samples = header.get("samples", 0)
    if type(samples) is not int:
        return None
    try:
        # Blocks, not length: a half-written file is sparse.
        size = sum((folder / name).lstat().st_blocks * 512 for name in (ROWS, MARKS))
        used = (folder / HEADER).lstat().st_mtime
    except OSError:
        return None
    with _lock_alone(folder) as alone:
        in_use = not alone
    label = str(header.get("label", "?"))
    return CacheEntry(folder, label, samples, size, not folder.name.endswith(PARTIAL), used, in_use)


def _open_file(folder: Path, name: str, flags: int) -> int:
    """A descriptor of a plain file in ``folder``; neither may be a link, and a second name of a file is refused."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return os.open(folder / name, flags | _NO_FOLLOW)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _NO_FOLLOW)
    try:
        fd = os.open(name, flags | _NO_FOLLOW, dir_fd=folder_fd)
    finally:
        os.close(folder_fd)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file of its own")
    return fd


def _lock(folder: Path, *, shared: bool) -> int | None:
    """A descriptor that marks the cache as in use until it is closed (the kernel does so at a kill too)."""
    try:
        fd = _open_file(folder, HEADER, os.O_RDONLY)
    except OSError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


@contextlib.contextmanager
def _lock_alone(folder: Path) -> Iterator[bool]:
    fd = _lock(folder, shared=False)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


# --------------------------------------------------------------------------- one cache


class DiskStore(HostStore):
    """Rows of one data set in a mapped file. Raises CacheFull when the disk is."""

    def __init__(
        self, owned: OwnedFolder, name: str, samples: int, row_bytes: int, lock: int, *, keep: bool, complete: bool
    ) -> None:
        self.keep = keep
        self.complete = complete
        self._owned, self._name, self._lock, self._row_bytes = owned, name, lock, row_bytes
        # A complete cache is only read, and may lie where this user cannot write.
        mode = os.O_RDONLY if complete else os.O_RDWR
        self._rows_fd, self._marks_fd = _open_file(self.folder, ROWS, mode), _open_file(self.folder, MARKS, mode)
        rows = _mapped(self._rows_fd, samples * row_bytes).view(samples, row_bytes)
        self._marks = _mapped(self._marks_fd, samples * 4).view(torch.int32)
        super().__init__(rows, self._marks)
        if not keep:
            # Also when the job ends without closing it.
            weakref.finalize(self, _remove_as, os.getpid(), owned, name)

    @property
    def folder(self) -> Path:
        """Where the files lie."""
        return self._owned.path / self._name

    def has(self, indices: torch.Tensor) -> torch.Tensor:
        """Which of ``indices`` are there, those written by other ranks included."""
        return self._marks[indices] != 0

    def write(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows, then their checksums. Raises CacheFull."""
        try:
            for position, index in enumerate(indices.tolist()):
                data = _bytes_of(rows[position])
                _write_fully(self._rows_fd, data, index * self._row_bytes)
                _write_fully(self._marks_fd, _mark(data).to_bytes(4, "little"), index * 4)
        except OSError as error:
            # Whatever ails the disk, training goes on from the source.
            raise CacheFull(f"{self._owned.path} cannot be written ({error.strerror})") from error

    def finish(self) -> bool:
        """Make a fully written cache permanent; False while rows are missing."""
        if self.complete or bool((self._marks == 0).any()):
            return self.complete
        try:
            os.fsync(self._rows_fd)
            os.fsync(self._marks_fd)
            if self.keep:
                self._make_permanent()
        except (OSError, FulltiltError) as error:
            raise CacheFull(f"{self._owned.path} cannot be written ({_why(error)})") from error
        self.complete = True
        return True

    def _make_permanent(self) -> None:
        final = self._name.removesuffix(PARTIAL)
        with self._owned.locked("", wait=True):
            if not os.path.lexists(self._owned.path / final) and self._owned.owns(self._name):
                self._owned.move(self._name, final)
        if os.path.lexists(self._owned.path / final):  # else it was cleared meanwhile; its rows can still be read
            self._name = final

    def close(self) -> None:
        """Close the files; a cache that is for this run only is deleted."""
        super().close()
        for fd in (self._rows_fd, self._marks_fd, self._lock):
            with contextlib.suppress(OSError):
                os.close(fd)
        if not self.keep:
            self._owned.remove(self._name)

    def delete_files(self) -> None:
        """Delete the cache at once; rows that are there can be read until it is closed."""
        self.keep = False
        self._owned.remove(self._name)

    def discard(self) -> bool:
        """Close and delete a cache that is of no use; False when it is not ours and stays."""
        self.keep = False
        self.close()
        return not os.path.lexists(self.folder)


def open_cache(
    cache_dir: Path, key: CacheKey, layout: Layout, samples: int, *, limit_bytes: int | None = None
) -> tuple[DiskStore, str]:
    """The cache for this key: complete, half-written and taken up again, or new; and in words which.

    Raises CacheFull if it does not fit or a foreign folder is in its place, UsageError or MachineError if the folder
    cannot be written.
    """
    owned = _claim(cache_dir)
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(PermissionError):  # where nothing may be written, nobody makes a cache
                stack.enter_context(owned.locked("", wait=True))
            return _open_cache(owned, cache_dir, key, layout, samples, limit_bytes)
    except OSError as error:
        raise _as_full(error, owned.path) from error


def _open_cache(
    owned: OwnedFolder,
    cache_dir: Path,
    key: CacheKey,
    layout: Layout,
    samples: int,
    limit_bytes: int | None,
) -> tuple[DiskStore, str]:
    final = key.folder_name(layout, samples)
    found_damaged = None
    for name, complete in ((final, True), (final + PARTIAL, False)):
        folder = owned.path / name
        writable = all(owned.owns(entry) for entry in (name, f"{name}/{ROWS}", f"{name}/{MARKS}"))
        lock = _lock(folder, shared=True) if complete or writable else None
        if lock is not None and _fits(folder, samples, layout):
            store = DiskStore(owned, name, samples, layout.row_bytes, lock, keep=True, complete=complete)
            with contextlib.suppress(OSError):  # somebody else's: then it is not for us to say when it was used
                os.utime(lock)
            if not complete:
                dropped = _drop_torn_rows(store)
                there = int((store._marks != 0).sum())
                torn = f" ({dropped} torn)" if dropped else ""
                return store, f"taken up again at {there} of {samples} samples{torn}"
            if (damaged := _first_damaged(store)) is None:
                return store, "found"
            store.discard()
            found_damaged = f"new; the one there was damaged in its sample {damaged}"
        elif lock is not None:
            os.close(lock)
        if not owned.remove(name):
            raise CacheFull(f"{folder} was not made by Fulltilt and is left as it is")
    _sweep(owned)
    make_room(cache_dir, samples * (layout.row_bytes + 4), limit_bytes)
    keep = key.reusable
    name = final + PARTIAL if keep else f"{ONE_RUN}{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}"
    try:
        _create(owned, name, key, layout, samples)
    except OSError:
        owned.remove(name)
        raise
    lock = _lock(owned.path / name, shared=True)
    assert lock is not None
    store = DiskStore(owned, name, samples, layout.row_bytes, lock, keep=keep, complete=False)
    return store, found_damaged or "new"


def _create(owned: OwnedFolder, name: str, key: CacheKey, layout: Layout, samples: int) -> None:
    """The header comes last: a folder without one was never whole."""
    header = {
        "format": FORMAT,
        "label": key.label,
        "samples": samples,
        "row_bytes": layout.row_bytes,
        "layout": layout.describe(),
        "created_at_s": time.time(),
    }
    owned.make(name)
    for file, size in ((ROWS, samples * layout.row_bytes), (MARKS, samples * 4)):
        with os.fdopen(owned.create(f"{name}/{file}"), "wb") as empty:
            empty.truncate(size)
    with os.fdopen(owned.create(f"{name}/{HEADER}"), "wb") as written:
        written.write(json.dumps(header, indent=1).encode() + b"\n")


def _fits(folder: Path, samples: int, layout: Layout) -> bool:
    """Whether a cache is of this format, whole in length, and of this layout."""
    header = read_header(folder)
    if header is None or header.get("format") != FORMAT or header.get("layout") != layout.describe():
        return False
    try:
        lengths = (folder / ROWS).lstat().st_size, (folder / MARKS).lstat().st_size
    except OSError:
        return False
    return header.get("samples") == samples and lengths == (samples * layout.row_bytes, samples * 4)


def _first_damaged(store: DiskStore) -> int | None:
    """A row of a complete cache that is not what was written, among as many as can be read in a moment."""
    samples, row_bytes = store.rows.shape
    looked_at = spread(samples, max(1, min(CHECKED_ROWS, CHECKED_BYTES // row_bytes)))
    return next((index for index in looked_at if not _is_whole(store, index)), None)


def _is_whole(store: DiskStore, index: int) -> bool:
    return int(store._marks[index]) & 0xFFFFFFFF == _mark(_bytes_of(store.rows[index]))


def _drop_torn_rows(store: DiskStore) -> int:
    dropped = 0
    for index in (store._marks != 0).nonzero().flatten().tolist():
        if not _is_whole(store, index):
            _write_fully(store._marks_fd, bytes(4), index * 4)
            dropped += 1
    return dropped


# --------------------------------------------------------------------------- bytes


def _mapped(fd: int, size: int) -> torch.Tensor:
    """The file as bytes. Nothing is ever stored through the mapping: torch has no read-only tensors, and warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ), dtype=torch.uint8)


def _remove_as(pid: int, owned: OwnedFolder, name: str) -> None:
    if os.getpid() == pid:  # a forked child drops its copy of the store; the files are its parent's
        owned.remove(name)


def _bytes_of(row: torch.Tensor) -> memoryview:
    """The bytes of a contiguous row without a copy; the caller keeps the row alive."""
    return memoryview((ctypes.c_ubyte * row.numel()).from_address(row.data_ptr())).cast("B")


def _mark(data: memoryview) -> int:
    return zlib.crc32(data) or 1  # 0 means that the row is not there


def _write_fully(fd: int, data: bytes | memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _why(error: Exception) -> str:
    return error.what if isinstance(error, FulltiltError) else getattr(error, "strerror", None) or str(error)


def _as_full(error: OSError, folder: Path) -> Exception:
    if error.errno in _NO_SPACE:
        return CacheFull(f"{folder} is full ({error.strerror})")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UsageError(f"the cache folder {folder} cannot be written: {error.strerror}", "Set cache_dir.")
    return FulltiltError(f"the cache in {folder} cannot be written: {error.strerror}")
