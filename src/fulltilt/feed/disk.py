"""The disk tier: decoded rows in a mapped file that the next run finds again.

    <cache>/<key>.partial/    while it is being written; a later run or another rank goes on where it stands
    <cache>/<key>/            complete; renamed as a whole, so that it exists fully or not at all
        cache.json            what it is, and the fingerprint it was made for
        rows.bin              packed rows, one after the other
        marks.bin             one checksum for each row, written after the row; 0 means not there

Rows are written with ``pwrite``, not through the mapping: a full disk is then an error that can be caught, where a
store to a mapped page would end the process with SIGBUS. A row counts when its checksum is there, and when a partial
cache is taken up again every checksum is recomputed: a row torn by a kill or a power cut is made anew.
Several processes may write at once, because they write the same bytes to the same places.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import secrets
import shutil
import time
import warnings
import weakref
import zlib
from pathlib import Path

import torch

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.feed.caches import (
    HEADER,
    MAKING,
    MARKS,
    ONE_RUN,
    PARTIAL,
    ROWS,
    CacheFull,
    list_caches,
    lock_shared,
    make_room,
    read_header,
    remove,
    sweep,
)
from fulltilt.feed.fingerprint import Fingerprint
from fulltilt.feed.order import spread
from fulltilt.feed.stores import HostStore
from fulltilt.feed.structure import Layout

FORMAT = 1
# Of a complete cache so much is compared with its checksums: a quarter of a second, and all of a small one.
CHECKED_BYTES, CHECKED_ROWS = 256 * 1024**2, 10_000
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskStore(HostStore):
    """Rows of one data set in a mapped file. Raises CacheFull when the disk is."""

    def __init__(self, folder: Path, samples: int, row_bytes: int, lock: int, *, keep: bool, complete: bool) -> None:
        self.folder = folder
        self.keep = keep
        self.complete = complete
        self._lock = lock
        self._row_bytes = row_bytes
        # A complete cache is only read, and may lie where this user cannot write.
        mode = os.O_RDONLY if complete else os.O_RDWR
        self._rows_fd, self._marks_fd = os.open(folder / ROWS, mode), os.open(folder / MARKS, mode)
        rows = _mapped(self._rows_fd, samples * row_bytes).view(samples, row_bytes)
        self._marks = _mapped(self._marks_fd, samples * 4).view(torch.int32)
        super().__init__(rows, self._marks)
        if not keep:
            # Also when the job ends without closing it.
            weakref.finalize(self, _remove_as, os.getpid(), folder)

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
            raise CacheFull(f"{self.folder.parent} cannot be written ({error.strerror})") from error

    def finish(self) -> bool:
        """Make a fully written cache permanent; False while rows are missing."""
        if self.complete or bool((self._marks == 0).any()):
            return self.complete
        try:
            os.fsync(self._rows_fd)
            os.fsync(self._marks_fd)
        except OSError as error:
            raise CacheFull(f"{self.folder.parent} cannot be written ({error.strerror})") from error
        if self.keep:
            final = self.folder.with_name(self.folder.name.removesuffix(PARTIAL))
            with contextlib.suppress(OSError):  # another rank was first, which is as good
                self.folder.rename(final)
            if final.exists():
                self.folder = final
        self.complete = True
        return True

    def close(self) -> None:
        """Close the files; a cache that is for this run only is deleted."""
        super().close()
        for fd in (self._rows_fd, self._marks_fd, self._lock):
            with contextlib.suppress(OSError):
                os.close(fd)
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def delete_files(self) -> None:
        """Delete the cache at once; rows that are there can be read until it is closed."""
        self.keep = False
        shutil.rmtree(self.folder, ignore_errors=True)

    def discard(self) -> None:
        """Close and delete: the cache is of no use."""
        self.keep = False
        self.close()


def open_cache(
    cache_dir: Path, fingerprint: Fingerprint, layout: Layout, samples: int, *, limit_bytes: int | None = None
) -> tuple[DiskStore, str]:
    """The cache for this fingerprint: complete, half-written and taken up again, or new; and in words which.

    Raises CacheFull if it does not fit, UsageError if the folder cannot be written.
    """
    need = samples * (layout.row_bytes + 4)
    final = cache_dir / fingerprint.key(layout)
    partial = final.with_name(final.name + PARTIAL)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the cache folder {cache_dir} cannot be made: {error.strerror}", "Set cache_dir.") from error
    found_damaged = None
    for folder, complete in ((final, True), (partial, False)):
        lock = lock_shared(folder)
        if lock is None:
            continue
        if _fits(folder, samples, layout):
            try:
                store = DiskStore(folder, samples, layout.row_bytes, lock, keep=True, complete=complete)
            except OSError as error:  # somebody else's, half-written
                raise _as_full(error, folder) from error
            with contextlib.suppress(OSError):  # somebody else's: then it is not for us to say when it was used
                os.utime(folder / HEADER)
            if complete and (damaged := _first_damaged(store)) is None:
                return store, "found"
            if complete:
                store.discard()
                found_damaged = f"new; the one there was damaged in its sample {damaged}"
                continue
            dropped = _drop_torn_rows(store)
            there = int((store._marks != 0).sum())
            return store, f"taken up again at {there} of {samples} samples" + (f" ({dropped} torn)" if dropped else "")
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
    sweep(cache_dir)
    stale = _remove_stale(cache_dir, fingerprint)
    make_room(cache_dir, need, limit_bytes)
    keep = fingerprint.reusable
    folder = partial if keep else cache_dir / f"{ONE_RUN}{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}"
    _create(folder, fingerprint, layout, samples)
    lock = lock_shared(folder)
    assert lock is not None
    store = DiskStore(folder, samples, layout.row_bytes, lock, keep=keep, complete=False)
    return store, found_damaged or stale or "new"


# --------------------------------------------------------------------------- folders


def _create(folder: Path, fingerprint: Fingerprint, layout: Layout, samples: int) -> None:
    header = {
        "format": FORMAT,
        "label": fingerprint.label,
        "parts": fingerprint.parts,
        "samples": samples,
        "row_bytes": layout.row_bytes,
        "layout": layout.describe(),
        "created_at_s": time.time(),
    }
    making = folder.with_name(f"{folder.name}.{os.getpid()}-{secrets.token_hex(4)}{MAKING}")
    try:
        making.mkdir()
        for name, size in ((ROWS, samples * layout.row_bytes), (MARKS, samples * 4)):
            with (making / name).open("wb") as file:
                file.truncate(size)
        (making / HEADER).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
        with contextlib.suppress(FileExistsError, OSError):
            making.rename(folder)  # fails if another rank was first: then theirs is used
        if not folder.exists():
            raise CacheFull(f"{folder} cannot be made")
    except OSError as error:
        raise _as_full(error, folder) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _fits(folder: Path, samples: int, layout: Layout) -> bool:
    """Whether a cache is of this format, whole in length, and of this layout."""
    header = read_header(folder)
    if header is None or header.get("format") != FORMAT or header.get("layout") != layout.describe():
        return False
    try:
        lengths = (folder / ROWS).stat().st_size, (folder / MARKS).stat().st_size
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


def _remove_stale(cache_dir: Path, fingerprint: Fingerprint) -> str | None:
    """Delete caches of the same data set whose files or code have changed; says what was found."""
    told = None
    for entry in list_caches(cache_dir):
        if entry.label != fingerprint.label or not fingerprint.reusable:
            continue
        changed = [name for name, digest in fingerprint.parts.items() if entry.parts.get(name) != digest]
        if not changed:
            continue  # another process has just completed it
        # Other arguments make another data set, such as the validation part of the same folder: its cache stays.
        kept = "arguments" in changed or not remove(entry)
        told = f"new; the one there {'is another' if kept else 'was refused as stale'} ({', '.join(changed)} changed)"
    return told


# --------------------------------------------------------------------------- bytes


def _mapped(fd: int, size: int) -> torch.Tensor:
    """The file as bytes. Nothing is ever stored through the mapping: torch has no read-only tensors, and warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ), dtype=torch.uint8)


def _remove_as(pid: int, folder: Path) -> None:
    if os.getpid() == pid:  # a forked child drops its copy of the store; the files are its parent's
        shutil.rmtree(folder, ignore_errors=True)


def _bytes_of(row: torch.Tensor) -> memoryview:
    """The bytes of a contiguous row without a copy; the caller keeps the row alive."""
    return memoryview((ctypes.c_ubyte * row.numel()).from_address(row.data_ptr())).cast("B")


def _mark(data: memoryview) -> int:
    return zlib.crc32(data) or 1  # 0 means that the row is not there


def _write_fully(fd: int, data: bytes | memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _as_full(error: OSError, folder: Path) -> Exception:
    if error.errno in _NO_SPACE:
        return CacheFull(f"{folder.parent} is full ({error.strerror})")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UsageError(f"the cache folder {folder.parent} cannot be written: {error.strerror}", "Set cache_dir.")
    return FulltiltError(f"the cache {folder} cannot be written: {error.strerror}")
