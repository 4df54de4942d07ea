"""Inside a trial: nothing of the user's is overwritten or deleted by Python's own calls.

| entry point                                        | in a trial                                                 |
|----------------------------------------------------|------------------------------------------------------------|
| open, os.open for writing what was there before    | opens a copy in the scratch folder, the file stays         |
| the same where a copy would take too long          | opens it for reading only                                  |
| os.remove, rename, mkdir, link, …                  | see `removals.py`                                          |

Types that open a file by themselves are exchanged for ones that ask here (`guarded_types.py`).
What it wrote aside is there to the job in other ways too (`aside_views.py`). Other new files are written where the job
wants them, and reported: a job may need them. Those that it writes while it trains, and what is only made where there
is none yet (locks, links), are noted, and taken away after the trial (`made.py`).
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fulltilt.tuning.aside_views import AsideViews
from fulltilt.tuning.guarded_types import GuardedTypes
from fulltilt.tuning.made import Made
from fulltilt.tuning.removals import Removals, absolute, is_there

# Copying a larger file to change it would take longer than the trial.
LARGEST_COPY_BYTES = 256 << 20
MOST_NAMES = 20
# As they are before they show what lies aside.
_stat, _scandir = os.stat, os.scandir

# Makes the guarded call out of the original one.
Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


class UsersFiles:
    """The files that were there when the trial began. ``diverted`` counts what was written elsewhere instead."""

    def __init__(self, scratch: Path, study: Path | None = None) -> None:
        self.removals = Removals(self)
        self.kept: list[str] = []
        self._read_only: set[tuple[int, int]] = set()
        self.trains = False  # from the first step on
        self._study = study or scratch.parent
        self._records = _beginnings(self._study)
        self._working_folder = f"{os.getcwd()}{os.sep}"  # noqa: PTH109
        self._begin(scratch)

    def _begin(self, scratch: Path) -> None:
        self._scratch = scratch
        self.made = Made(scratch.parent, self._study)
        self._free = (*_beginnings(scratch), *(f"/{place}{os.sep}" for place in ("dev", "proc", "sys")))
        self._began = _now_on_disk(scratch)
        self.diverted = 0

    def go_on_in(self, scratch: Path) -> None:
        """In a fork: what was written aside before it is this trial's too, and what it writes is nobody else's."""
        if scratch.resolve() != self._scratch.resolve():
            shutil.copytree(self._scratch, scratch, dirs_exist_ok=True)
            self._begin(scratch)

    def guards(self) -> Iterator[tuple[Any, str, Guard]]:
        """Where to stand: the module, the name of the call, and what to make of it."""
        yield builtins, "open", self._opening
        yield io, "open", self._opening
        yield os, "open", self._opening_raw
        yield from AsideViews(self).guards()
        yield from GuardedTypes(self).guards()
        yield from self.removals.guards()

    # ------------------------------------------------------------------ where things go

    def aside(self, path: Any) -> Path:
        """Where in the scratch folder a path of the user's is written instead."""
        return self._scratch / absolute(path).replace(":", "").lstrip("/\\")

    def is_path(self, value: Any) -> bool:
        """Whether a value is a path, and not one of a device or of the scratch folder itself."""
        return isinstance(value, str | bytes | os.PathLike) and not self._is_free(value)

    def _is_free(self, path: Any) -> bool:
        """Whether this is a place of nobody's: the scratch folder itself, devices."""
        return absolute(path).startswith(self._free)

    def was_there(self, path: Any, follow: bool = False) -> bool:
        """Whether a path, or what it leads to, is the user's: it exists and was not changed since this trial began.

        A folder changes with what is put into it, and is the user's as long as something in it is.
        """
        if not self.is_path(path):
            return False
        try:
            found = _stat(path, follow_symlinks=follow)
            if found.st_ctime < self._began or not stat.S_ISDIR(found.st_mode):
                return found.st_ctime < self._began
            with _scandir(path) as entries:
                return any(self.was_there(entry.path) for entry in entries)
        except (OSError, ValueError):
            return False

    def keep(self, path: Any) -> None:
        """Something of the user's was not changed, although the job meant to."""
        name = os.fsdecode(path)
        if name not in self.kept and len(self.kept) < MOST_NAMES:
            self.kept.append(name)

    def note(self, path: Any, stays: bool = True) -> None:
        """Something new was made. What is written under the working folder while the job trains never stays."""
        name = absolute(path) if self.is_path(path) else None
        if name is not None and not name.startswith(self._records):
            self.made.note(name, stays and not self._passes(name))

    def would_be_taken_away(self, path: Any) -> bool:
        """Whether this is not there yet, and would not stay if it were made now."""
        return not is_there(path) and self._passes(absolute(path))

    def _passes(self, name: str) -> bool:
        return self.trains and name.startswith(self._working_folder)

    # ------------------------------------------------------------------ the guards

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return self.opened(file, mode, lambda file, mode: original(file, mode, *args, **kwargs))

        return opened

    def opened(self, file: Any, mode: str, original: Callable[[Any, str], Any]) -> Any:
        """Open a file as ``open`` does: for writing elsewhere where it is the user's, and note it where it is new."""
        if not self.is_path(file):
            return original(file, mode)
        if "r" in mode:
            self.removals.refuse_hidden(file)
        if not set(mode) & set("wa+x"):
            aside = self.aside(file)
            return original(aside if aside.is_file() else file, mode)
        if "x" in mode and self.removals.is_gone(file):
            mode = mode.replace("x", "w")
        if "x" not in mode:
            starts_empty, only_appends = "w" in mode, "a" in mode and "+" not in mode
            if self.is_read_only(file, starts_empty, only_appends):
                return original(file, "rb" if "b" in mode else "r")
            file = self.copy_to_write(file, starts_empty, only_appends)
        is_new = not is_there(file)
        opened_file = original(file, mode)
        if is_new:
            self.note(file, stays="x" not in mode)
        return opened_file

    def _opening_raw(self, original: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            writes = flags & (os.O_WRONLY | os.O_RDWR) and not flags & os.O_EXCL and kwargs.get("dir_fd") is None
            if writes and self.is_path(path):
                starts_empty, only_appends = bool(flags & os.O_TRUNC), bool(flags & os.O_APPEND and flags & os.O_WRONLY)
                if self.is_read_only(path, starts_empty, only_appends):
                    return original(path, os.O_RDONLY)
                path = self.copy_to_write(path, starts_empty, only_appends)
                flags |= os.O_CREAT
            is_new = bool(flags & os.O_CREAT) and kwargs.get("dir_fd") is None and not is_there(path)
            descriptor = original(path, flags, *args, **kwargs)
            if is_new:
                self.note(path, stays=not flags & os.O_EXCL)
            return descriptor

        return opened

    def is_read_only(self, file: Any, starts_empty: bool = False, only_appends: bool = False) -> bool:
        """Whether a file of the user's would be changed where it lies: it is too large to change a copy instead."""
        if starts_empty or not self._is_users_file(file) or self.removals.is_gone(file) or self.aside(file).exists():
            return False
        found = _stat(file)
        if found.st_size <= LARGEST_COPY_BYTES or only_appends:
            return False
        self.keep(file)
        self._read_only.add((found.st_dev, found.st_ino))
        return True

    def is_opened_read_only(self, descriptor: int) -> bool:
        """Whether a job that wanted to write to this descriptor was given one for reading only."""
        if not self._read_only or descriptor < 0:
            return False
        found = os.fstat(descriptor)
        return (found.st_dev, found.st_ino) in self._read_only

    def copy_aside(self, source: Any, target: Any) -> None:
        """A file of the user's, found by the job at another place too; not a large one, and no folder."""
        if self._is_users_file(source) and _stat(source).st_size <= LARGEST_COPY_BYTES and self.is_path(target):
            aside = self.aside(target)
            aside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, aside)

    def _is_users_file(self, file: Any) -> bool:
        return self.was_there(file, follow=True) and stat.S_ISREG(_stat(file).st_mode)

    def copy_to_write(self, file: Any, starts_empty: bool, only_appends: bool = False) -> Any:
        """The path to write to: a copy in the scratch folder of a file that was there, any other as it is.

        Of a large file, what is only appended goes aside alone; ``is_read_only`` is asked before.
        """
        if not self._is_users_file(file):
            return file
        aside = self.aside(file)
        aside.parent.mkdir(parents=True, exist_ok=True)
        if not starts_empty and not aside.exists():
            if self.removals.is_gone(file) or (only_appends and _stat(file).st_size > LARGEST_COPY_BYTES):
                aside.touch()
            else:
                shutil.copyfile(file, aside)
        self.diverted += 1
        return aside

    def where(self, path: Any) -> Any:
        """Where something lies that the job may have written aside, and only there."""
        is_aside = self.is_path(path) and not is_there(path) and self.aside(path).is_file()
        return self.aside(path) if is_aside else path


def _beginnings(folder: Path) -> tuple[str, ...]:
    """How paths in a folder begin: as it was given, without "..", and behind its links."""
    return tuple({f"{place}{os.sep}" for place in (absolute(folder), os.path.realpath(folder))})


def _now_on_disk(folder: Path) -> float:
    """The present moment on the clock that stamps files, which may be another machine's."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_ctime
