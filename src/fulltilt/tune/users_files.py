"""Inside a trial: nothing of the user's is overwritten or deleted by Python's own calls.

| entry point                                        | in a trial                                                 |
|----------------------------------------------------|------------------------------------------------------------|
| open, os.open for writing what was there before    | opens a copy in the scratch folder, the file stays         |
| os.remove, rename, … of what was there before      | does nothing                                               |
| os.replace of a new file over one that was there   | the new one goes to the scratch folder                     |
| os.mkdir, symlink, link where something was removed| does nothing: to the job it is gone                        |
| os.remove of what this trial wrote aside           | removes it there                                           |

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

from fulltilt.tune.aside_views import AsideViews
from fulltilt.tune.made import Made

# Copying a larger file to change it would take longer than the trial.
LARGEST_COPY_BYTES = 256 << 20
MOST_NAMES = 20
# As they are before they show what lies aside.
_lstat, _scandir = os.lstat, os.scandir

# Makes the guarded call out of the original one.
Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


class UsersFiles:
    """The files that were there when the trial began. ``diverted`` counts what was written elsewhere instead."""

    def __init__(self, scratch: Path, study: Path | None = None) -> None:
        self._gone: set[str] = set()
        self.kept: list[str] = []
        self.trains = False  # from the first step on
        self._study = study or scratch.parent
        self._records = f"{self._study.absolute()}{os.sep}"
        self._working_folder = f"{os.getcwd()}{os.sep}"  # noqa: PTH109
        self._begin(scratch)

    def _begin(self, scratch: Path) -> None:
        self._scratch = scratch
        self._made = Made(scratch.parent, self._study)
        self._free = tuple(f"{place}{os.sep}" for place in (scratch.absolute(), "/dev", "/proc", "/sys"))
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
        for name in ("remove", "unlink", "rmdir", "truncate"):
            yield os, name, self._keeping
        yield shutil, "rmtree", self._removing_tree
        for name in ("rename", "replace"):
            yield os, name, self._moving
        yield from AsideViews(self).guards()
        yield os, "mkdir", self._making_folder
        for name in ("symlink", "link"):
            yield os, name, self._making_link

    # ------------------------------------------------------------------ where things go

    def aside(self, path: Any) -> Path:
        """Where in the scratch folder a path of the user's is written instead."""
        return self._scratch / _absolute(path).replace(":", "").lstrip("/\\")

    def is_path(self, value: Any) -> bool:
        """Whether a value is a path, and not one of a device or of the scratch folder itself."""
        return isinstance(value, str | bytes | os.PathLike) and not self._is_free(value)

    def _is_free(self, path: Any) -> bool:
        """Whether this is a place of nobody's: the scratch folder itself, devices."""
        return _absolute(path).startswith(self._free)

    def was_there(self, path: Any, follow: bool = False) -> bool:
        """Whether a path, or what it leads to, is the user's: it exists and was not changed since this trial began.

        A folder changes with what is put into it, and is the user's as long as something in it is.
        """
        if not self.is_path(path):
            return False
        try:
            found = os.stat(path, follow_symlinks=follow)  # noqa: PTH116
            if found.st_ctime < self._began or not stat.S_ISDIR(found.st_mode):
                return found.st_ctime < self._began
            with _scandir(path) as entries:
                return any(self.was_there(entry.path) for entry in entries)
        except (OSError, ValueError):
            return False

    def _keep(self, path: Any) -> None:
        name = os.fsdecode(path)
        if name not in self.kept and len(self.kept) < MOST_NAMES:
            self.kept.append(name)

    def _note(self, path: Any, stays: bool = True) -> None:
        """Something new was made. What is written under the working folder while the job trains never stays."""
        absolute = _absolute(path) if self.is_path(path) else None
        if absolute is not None and not absolute.startswith(self._records):
            self._made.note(absolute, stays and not self._passes(absolute))

    def would_be_taken_away(self, path: Any) -> bool:
        """Whether this is not there yet, and would not stay if it were made now."""
        return not _is_there(path) and self._passes(_absolute(path))

    def _passes(self, absolute: str) -> bool:
        return self.trains and absolute.startswith(self._working_folder)

    # ------------------------------------------------------------------ the guards

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not self.is_path(file):
                return original(file, mode, *args, **kwargs)
            if not set(mode) & set("wa+x"):
                aside = self.aside(file)
                return original(aside if aside.is_file() else file, mode, *args, **kwargs)
            if "x" in mode and self._is_gone(file):
                mode = mode.replace("x", "w")
            if "x" not in mode:
                file = self.copy_to_write(file, starts_empty="w" in mode, only_appends="a" in mode and "+" not in mode)
            is_new = not _is_there(file)
            opened_file = original(file, mode, *args, **kwargs)
            if is_new:
                self._note(file, stays="x" not in mode)
            return opened_file

        return opened

    def _opening_raw(self, original: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            writes = flags & (os.O_WRONLY | os.O_RDWR) and not flags & os.O_EXCL and kwargs.get("dir_fd") is None
            if writes and self.is_path(path):
                only_appends = bool(flags & os.O_APPEND and flags & os.O_WRONLY)
                path = self.copy_to_write(path, bool(flags & os.O_TRUNC), only_appends)
                flags |= os.O_CREAT
            is_new = bool(flags & os.O_CREAT) and kwargs.get("dir_fd") is None and not _is_there(path)
            descriptor = original(path, flags, *args, **kwargs)
            if is_new:
                self._note(path, stays=not flags & os.O_EXCL)
            return descriptor

        return opened

    def copy_to_write(self, file: Any, starts_empty: bool, only_appends: bool = False) -> Any:
        """The path to write to: a copy in the scratch folder of a file that was there, any other as it is.

        Of a large file, what is only appended goes aside alone.
        """
        if not self.was_there(file, follow=True) or not os.path.isfile(file):  # noqa: PTH113
            return file
        aside = self.aside(file)
        is_large = os.path.getsize(file) > LARGEST_COPY_BYTES  # noqa: PTH202
        if is_large and not starts_empty and not only_appends:
            return file
        aside.parent.mkdir(parents=True, exist_ok=True)
        if not starts_empty and not aside.exists():
            if self._is_gone(file) or is_large:
                aside.touch()
            else:
                shutil.copyfile(file, aside)
        self.diverted += 1
        return aside

    def _keeping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def keep(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None:  # part of an rmtree
                return original(path, *args, **kwargs)
            if not self.was_there(path):
                return original(self.where(path), *args, **kwargs)
            self._keep(path)
            self._gone.add(_absolute(path))
            return None

        return keep

    def _removing_tree(self, original: Callable[..., Any]) -> Callable[..., Any]:
        keep = self._keeping(original)

        def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
            keep(path, *args, **kwargs)
            if self.is_path(path) and self.aside(path).is_dir():
                original(self.aside(path), ignore_errors=True)

        return rmtree

    def _making_folder(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A folder that an earlier trial has made may be made once more, as in a training of its own."""

        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            is_users = kwargs.get("dir_fd") is None and self.is_path(path)
            if is_users and self._stays(path):
                return
            try:
                original(path, *args, **kwargs)
            except FileExistsError:
                if not is_users or not self._made.is_folder_of_a_trial(_absolute(path)):
                    raise
            else:
                if is_users:
                    self._note(path)

        return mkdir

    def _making_link(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def link(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            if self._stays(target):
                return
            original(source, target, *args, **kwargs)
            self._note(target, stays=False)

        return link

    def _stays(self, path: Any) -> bool:
        """Whether the job has deleted something of the user's here: it is there still, and stays what it was."""
        return self._is_gone(path) and _is_there(path)

    def _is_gone(self, path: Any) -> bool:
        """Whether the job believes that it has deleted this, or a folder around it."""
        if not self._gone or not self.is_path(path):
            return False
        absolute = _absolute(path)
        return any(absolute == gone or absolute.startswith(f"{gone}{os.sep}") for gone in self._gone)

    def where(self, path: Any) -> Any:
        """Where something lies that the job may have written aside, and only there."""
        is_aside = self.is_path(path) and not _is_there(path) and self.aside(path).is_file()
        return self.aside(path) if is_aside else path

    def _moving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_path(source) and self.aside(source).exists():
                # Saved by this trial, as in "write a temporary file, then rename it over the checkpoint".
                moved = self.aside(target)
                moved.parent.mkdir(parents=True, exist_ok=True)
                original(self.aside(source), moved, *args, **kwargs)
                if _is_there(source) and not self.was_there(source):
                    os.unlink(source)  # noqa: PTH108 - an empty one of mkstemp, into which it was saved
                return None
            if self.was_there(source):
                self._keep(source)
                self._gone.add(_absolute(source))
                return None
            if not self.was_there(target):
                moved = original(source, target, *args, **kwargs)
                self._note(target)
                return moved
            # Written by this trial and put over a file of the user's.
            self._keep(target)
            moved = self.aside(target)
            moved.parent.mkdir(parents=True, exist_ok=True)
            try:
                return original(source, moved, *args, **kwargs)
            except OSError:  # the scratch folder lies on another file system
                shutil.copyfile(source, moved)
                return os.unlink(source)  # noqa: PTH108

        return move


def _is_there(path: Any) -> bool:
    try:
        _lstat(path)
    except (OSError, ValueError):
        return False
    return True


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - the path need not exist, nor be resolved


def _now_on_disk(folder: Path) -> float:
    """The present moment on the clock that stamps files, which may be another machine's."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_ctime
