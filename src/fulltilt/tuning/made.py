"""What trials make that the next one, or the user, would stumble over: half a checkpoint, locks, folders made once.

A trial is ended in the middle of its training. What it has written since its first step is then incomplete: its weights
went aside, a file beside them did not. A lock would keep everybody else from training. Both are taken away once the
trial has ended. What a job makes before it trains (data sets, caches) stays; a later trial may make a folder once more.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LEDGER = "made.jsonl"
# As it is before anybody guards it: the ledger is no file of the user's.
_open = os.open


class Entry(NamedTuple):
    """Something that was made, and whether it stays."""

    path: str
    is_folder: bool
    stays: bool
    device: int
    inode: int

    def is_unchanged(self) -> bool:
        """Whether it is still there, and nobody has put something else in its place."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)


class Made:
    """Notes what a process makes, line by line: it may be killed at any time. ``study``: the study's own folder."""

    def __init__(self, folder: Path, study: Path) -> None:
        self._ledger = folder / LEDGER
        self._of_study = study / LEDGER

    def note(self, path: str, stays: bool) -> None:
        """A file, a link or a folder has just been made. Files that stay are nobody's concern."""
        with contextlib.suppress(OSError):  # gone already, or the disk is full: nothing that a job should end by
            found = os.lstat(path)
            is_folder = stat.S_ISDIR(found.st_mode)
            if is_folder or not stays:
                _append(self._ledger, Entry(path, is_folder, stays, found.st_dev, found.st_ino))

    def is_folder_of_a_trial(self, path: str) -> bool:
        """Whether an earlier trial of this study has made this folder."""
        return any(entry.is_folder and entry.path == path for entry in _read(self._of_study))


def clear_up(folder: Path, study: Path) -> list[str]:
    """After a trial: take away what does not stay, and let the study know the folders that do.

    At its end (``folder`` is that of the study) folders that stayed empty go too. Returns the files that were taken.
    """
    taken_away = []
    unchanged = [entry for entry in _read(folder / LEDGER) if entry.is_unchanged()]
    for entry in sorted(unchanged, key=lambda entry: len(entry.path), reverse=True):  # folders after what is in them
        with contextlib.suppress(OSError):
            if not entry.stays and not entry.is_folder:
                Path(entry.path).unlink()
                taken_away.append(entry.path)
            elif entry.is_folder and (not entry.stays or folder == study) and not os.listdir(entry.path):  # noqa: PTH208
                Path(entry.path).rmdir()
            elif entry.is_folder and folder != study:
                _append(study / LEDGER, entry)
    return taken_away


def _append(ledger: Path, entry: Entry) -> None:
    descriptor = _open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, f"{json.dumps(entry)}\n".encode())
    finally:
        os.close(descriptor)


def _read(ledger: Path) -> Iterator[Entry]:
    """The entries, without a last one that was cut off."""
    with contextlib.suppress(OSError):
        descriptor = _open(ledger, os.O_RDONLY)
        with os.fdopen(descriptor, encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    yield Entry(*json.loads(line))
