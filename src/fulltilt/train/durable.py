"""Bytes that are on the disk when the call returns, or an error that says how many were needed and how many are free.

Every write, fsync and rename of a checkpoint goes through here, so that a test can kill the process at each of them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fulltilt.errors import MachineError
from fulltilt.store import OwnedFolder

# Small enough that a write never holds a page-cache lock for long, large enough that the call itself costs nothing.
CHUNK_BYTES = 16 * 2**20
_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True)
class FileSum:
    """The size and SHA-256 of a file as it was written."""

    bytes: int
    sha256: str


def write_file(path: Path, parts: Iterable[bytes | memoryview], needed_bytes: int | None = None) -> FileSum:
    """Write a new file and flush it to the disk; hashing happens in the same pass.

    Raises MachineError, which names ``needed_bytes`` (the whole checkpoint's) when the disk is full.
    """
    digest = hashlib.sha256()
    written = 0
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o644)
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                for start in range(0, len(view), CHUNK_BYTES):
                    chunk = view[start : start + CHUNK_BYTES]
                    digest.update(chunk)
                    written += len(chunk)
                    while chunk:
                        chunk = chunk[os.write(fd, chunk) :]
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise cannot_write(path, error, needed_bytes or written) from error
    return FileSum(written, digest.hexdigest())


def hash_file(path: Path) -> FileSum:
    """The size and SHA-256 of a file as it is now. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileSum(file.tell(), digest.hexdigest())


def sync_file(path: Path) -> FileSum:
    """Flush a file that somebody else wrote to the disk; returns what it holds. Raises MachineError."""
    try:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        return hash_file(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def sync_folder(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk. Windows has no such call and needs none."""
    if os.name == "nt":
        return
    try:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise cannot_write(folder, error) from error


def rename(folder: OwnedFolder, old: Path, new: Path) -> None:
    """Rename an entry of a folder of ours and flush that folder. Raises ForeignFiles, MachineError."""
    try:
        folder.move(old, new)
    except OSError as error:
        raise cannot_write(new, error) from error
    sync_folder(new.parent)


def free_bytes(folder: Path) -> int:
    """Bytes an ordinary user may still write into ``folder`` or the nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def refused_write(error: BaseException, out: Path) -> MachineError | None:
    """The error for a disk that took no more of what goes to ``out``; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    return cannot_write(Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else out, error)


def cannot_write(path: Path, error: OSError, needed_bytes: int | None = None) -> MachineError:
    """The error for a refused write: the cause, the file, and what to change."""
    cause = error.strerror or str(error)
    if error.errno == errno.EFBIG:
        return MachineError(
            f"cannot write {path}: it would pass the file-size limit ({needed_bytes or 0:,} bytes needed)",
            "Raise it with `ulimit -f unlimited`, or choose another folder with --out.",
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = free_bytes(path if path.is_dir() else path.parent)
        needed = f"{needed_bytes:,} bytes needed, " if needed_bytes else ""
        return MachineError(
            f"cannot write {path}: {cause} ({needed}{free:,} free)",
            "Free some space, keep fewer checkpoints (keep_last, keep_best), or choose another folder with --out.",
        )
    return MachineError(f"cannot write {path}: {cause}", "Make the folder writable or choose another one with --out.")
