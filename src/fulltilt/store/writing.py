"""Writing a run folder: lines appended whole, files replaced whole, and a full disk told as what it is."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fulltilt.errors import ForeignFiles, FulltiltError, RunFolderError
from fulltilt.store.codec import encode
from fulltilt.store.names import RUN_FILE, RUN_FILES
from fulltilt.store.owned_folder import OwnedFolder, kind_of, write_named_file

RUN = "run folder"
TRAINING = "training"
PRIVATE = 0o600
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def create_folder(folder: Path, flag: str = "--out") -> Path:
    """Make or take over a run folder. Raises ForeignFiles, UsageError or MachineError.

    The folder of a training is one too: every training records itself.
    """
    owned = OwnedFolder.claim(folder, TRAINING if kind_of(folder) == TRAINING else RUN, flag=flag)
    if in_the_way := [path.name for path in _run_files(folder) if not owned.owns(path)]:
        raise ForeignFiles(
            f"{folder} holds files that Fulltilt did not write: {', '.join(in_the_way)}",
            f"Move them elsewhere, or choose another folder with {flag}.",
        )
    return folder


def move_earlier_run(folder: Path) -> Path | None:
    """Move an earlier run in ``folder`` into a folder of its own inside it; None when there was none."""
    owned = OwnedFolder(folder)
    if not owned.owns(RUN_FILE):
        return None
    number = 1
    while os.path.lexists(folder / f"before-{number}"):
        number += 1
    earlier = f"before-{number}"
    try:
        owned.make(earlier)
        for path in _run_files(folder):
            owned.move(path.name, f"{earlier}/{path.name}")
    except OSError as error:
        raise RunFolderError(f"cannot move the earlier run in {folder} to {earlier}: {error}") from error
    return folder / earlier


def _run_files(folder: Path) -> list[Path]:
    return [path for pattern in RUN_FILES for path in folder.glob(pattern)]


def write_json(path: Path, value: Any, again: bool = False) -> None:
    """Write a record or plain value so that ``path`` holds either the old content or the whole new one."""
    write_text(path, _to_json(value, indent=1) + "\n", again=again)


def write_text(
    path: Path, text: str, encoding: str = "utf-8", again: bool = False, signature: bytes | None = None
) -> None:
    """Write ``text`` whole, readable by its owner alone: it may hold a command line. Raises ForeignFiles.

    A file that is written ``again`` and again costs the folder's marker one line only. Outside of Fulltilt's own
    folders an existing file is replaced only where it bears the ``signature``.
    """
    # A file name that is not UTF-8 reaches us with surrogates, which UTF-8 cannot hold.
    data = text.encode(encoding, errors="backslashreplace")
    try:
        owned = OwnedFolder.around(path)
        if owned is not None:
            owned.write(_absolute(path), data, PRIVATE, again)
        else:
            write_named_file(path, data, PRIVATE, signature)
    except OSError as error:
        raise _cannot_write(path, error) from error


# Windows would turn each newline into two characters without O_BINARY.
_APPENDING = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)


class LineWriter:
    """Appends one JSON object a line to a file of which it is the only writer.

    Each batch of lines goes out in one write call, so that a reader beside it sees whole lines or a torn last one.
    A batch that the disk has no room for is taken back whole, so that writing may go on once there is room again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._absolute = _absolute(path)  # the job may change its working folder
        self._fd: int | None = None
        try:
            self._owner = OwnedFolder.around(path)
            if self._owner is not None and not self._owner.check(self._absolute).exists():
                os.close(self._owner.create(self._absolute, PRIVATE))
            self._fd = os.open(path, _APPENDING | os.O_CREAT | _NO_FOLLOW, PRIVATE)
            self._file = _file_behind(self._fd)
            _mend_end(self._fd, path)
        except OSError as error:
            self.close()
            raise _cannot_write(path, error) from error
        except FulltiltError:
            self.close()
            raise

    def write(self, values: Iterable[Any]) -> None:
        """Append records or plain values, one line each: all of them or, with a RunFolderError, none."""
        data = "".join(_to_json(value) + "\n" for value in values).encode()
        if not data or self._fd is None:
            return
        end: int | None = None
        try:
            if _file_behind(self._fd) != self._file:
                self._fd = self._opened_again()
            end = os.fstat(self._fd).st_size
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            if end is not None:
                self._take_back(end)
            raise _cannot_write(self.path, error) from error

    def close(self) -> None:
        """Close the file. Writing afterwards does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None and _file_behind(fd) == self._file:
            os.close(fd)
            if self._owner is not None and self._owner.owns(self._absolute):
                self._owner.record(self._absolute)

    def _opened_again(self) -> int:
        """A script that closes all descriptors, as daemons do, closes ours; the number may be its own file's now."""
        fd = os.open(self._absolute, _APPENDING)
        if _file_behind(fd) == self._file:
            return fd
        os.close(fd)
        raise OSError("another file has taken its place")

    def _take_back(self, end: int) -> None:
        assert self._fd is not None
        try:
            os.ftruncate(self._fd, end)
        except OSError:
            self.close()  # the next line would be glued to the torn one


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links


def _to_json(value: Any, indent: int | None = None) -> str:
    # ASCII only: a path that is not UTF-8 comes with surrogates, which JSON can escape and UTF-8 cannot hold.
    separators = (",", ":") if indent is None else None
    return json.dumps(encode(value), allow_nan=False, indent=indent, separators=separators)


def _mend_end(fd: int, path: Path) -> None:
    """Drop the torn last line of a killed writer, which would swallow the next one.

    The file is searched from its end, so that a long one costs no more than a short one.
    """
    size = end = os.fstat(fd).st_size
    if size == 0:
        return
    if _read_at(fd, 0, 1) != b"{":
        raise RunFolderError(f"{path} exists and was not written by Fulltilt", "Choose another file with --out.")
    newline = -1
    while newline < 0 and end > 0:
        start = max(0, end - 65536)
        newline = _read_at(fd, start, end - start).rfind(b"\n")
        end = start
    whole = 0 if newline < 0 else start + newline + 1
    if whole == size:
        return
    try:
        json.loads(_read_at(fd, whole, size - whole))
    except (ValueError, RecursionError):
        os.ftruncate(fd, whole)
    else:
        os.write(fd, b"\n")  # only the newline was missing


def _file_behind(fd: int) -> tuple[int, int] | None:
    """Which file a descriptor stands for, whatever its name; None when it is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _read_at(fd: int, start: int, length: int) -> bytes:
    os.lseek(fd, start, os.SEEK_SET)  # appending is not disturbed: O_APPEND writes at the end wherever we read
    return os.read(fd, length)


def _cannot_write(path: Path, error: OSError) -> RunFolderError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Free some space or choose another folder with --out." if full else None
    return RunFolderError(f"cannot write {path}: {error.strerror or error}", remedy)
