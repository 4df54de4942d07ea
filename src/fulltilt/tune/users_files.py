"""Inside a trial: nothing of the user's is overwritten or deleted by Python's own calls.

| entry point                                        | in a trial                                                 |
|----------------------------------------------------|------------------------------------------------------------|
| open, os.open for writing what was there before    | opens a copy in the scratch folder, the file stays         |
| os.remove, rename, … of what was there before      | does nothing                                               |
| os.replace of a new file over one that was there   | the new one goes to the scratch folder                     |
| os.mkdir, symlink, link where something was removed| does nothing: to the job it is gone                        |
| os.stat, os.remove of what this trial wrote aside  | finds it there, removes it there                           |
| shutil.copy of what this trial wrote aside         | the copy goes aside too                                    |

Other new files are written where the job wants them, and reported: a job may need them.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Copying a larger file to append to it would take longer than the trial.
LARGEST_COPY_BYTES = 256 << 20
MOST_NAMES = 20

# Makes the guarded call out of the original one.
Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


class UsersFiles:
    """The files that were there when the trial began. ``diverted`` counts what was written elsewhere instead."""

    def __init__(self, scratch: Path) -> None:
        self._gone: set[str] = set()
        self.kept: list[str] = []
        self._begin(scratch)

    def _begin(self, scratch: Path) -> None:
        self._scratch = scratch
        self._began = _now_on_disk(scratch)
        self._free = tuple(f"{place}{os.sep}" for place in (scratch.absolute(), "/dev", "/proc", "/sys"))
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
        yield shutil, "rmtree", self._keeping
        for name in ("rename", "replace"):
            yield os, name, self._moving
        yield os, "stat", self._looking
        for name in ("copy", "copy2", "copyfile"):
            yield shutil, name, self._copying
        yield os, "mkdir", partial(self._making, 0)
        for name in ("symlink", "link"):
            yield os, name, partial(self._making, 1)

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

    def _was_there(self, path: Any, follow: bool = False) -> bool:
        """Whether a path, or what it leads to, is the user's: it exists and was not changed since this trial began."""
        if not self.is_path(path):
            return False
        try:
            return os.stat(path, follow_symlinks=follow).st_ctime < self._began  # noqa: PTH116
        except (OSError, ValueError):
            return False

    def _keep(self, path: Any) -> None:
        name = os.fsdecode(path)
        if name not in self.kept and len(self.kept) < MOST_NAMES:
            self.kept.append(name)

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
                file = self.copy_to_write(file, starts_empty="w" in mode)
            return original(file, mode, *args, **kwargs)

        return opened

    def _opening_raw(self, original: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            writes = flags & (os.O_WRONLY | os.O_RDWR) and not flags & os.O_EXCL and kwargs.get("dir_fd") is None
            if writes and self.is_path(path):
                path = self.copy_to_write(path, starts_empty=bool(flags & os.O_TRUNC))
                flags |= os.O_CREAT
            return original(path, flags, *args, **kwargs)

        return opened

    def copy_to_write(self, file: Any, starts_empty: bool) -> Any:
        """The path to write to: a copy in the scratch folder of a file that was there, any other as it is."""
        if not self._was_there(file, follow=True) or not os.path.isfile(file):  # noqa: PTH113
            return file
        aside = self.aside(file)
        if not starts_empty and os.path.getsize(file) > LARGEST_COPY_BYTES:  # noqa: PTH202
            return file
        aside.parent.mkdir(parents=True, exist_ok=True)
        if not starts_empty and not aside.exists():
            if self._is_gone(file):
                aside.touch()
            else:
                shutil.copyfile(file, aside)
        self.diverted += 1
        return aside

    def _keeping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def keep(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._was_there(path):
                return original(self._where(path), *args, **kwargs)
            self._keep(path)
            self._gone.add(_absolute(path))
            return None

        return keep

    def _making(self, place: int, original: Callable[..., Any]) -> Callable[..., Any]:
        """What is made where the job has deleted something of the user's is there already, and stays what it was."""

        def make(*args: Any, **kwargs: Any) -> Any:
            if len(args) > place and self._is_gone(args[place]) and os.path.lexists(args[place]):
                return None
            return original(*args, **kwargs)

        return make

    def _is_gone(self, path: Any) -> bool:
        """Whether the job believes that it has deleted this, or a folder around it."""
        if not self._gone or not self.is_path(path):
            return False
        absolute = _absolute(path)
        return any(absolute == gone or absolute.startswith(f"{gone}{os.sep}") for gone in self._gone)

    def _where(self, path: Any) -> Any:
        """Where something lies that the job may have written aside, and only there."""
        is_aside = self.is_path(path) and not os.path.lexists(path) and self.aside(path).is_file()
        return self.aside(path) if is_aside else path

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(path, *args, **kwargs)
            except FileNotFoundError:
                # Files alone: a folder that is not there must still be made before other things are written into it.
                if kwargs.get("dir_fd") is None and self.is_path(path) and self.aside(path).is_file():
                    return original(self.aside(path), *args, **kwargs)
                raise

        return stat

    def _copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def copy(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_path(source) or not self.aside(source).is_file() or not self.is_path(target):
                return original(source, target, *args, **kwargs)
            aside = self.aside(target)
            (aside if os.path.isdir(target) else aside.parent).mkdir(parents=True, exist_ok=True)  # noqa: PTH112
            self.diverted += 1
            original(self.aside(source), aside, *args, **kwargs)
            return target

        return copy

    def _moving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_path(source) and self.aside(source).exists():
                # Saved by this trial, as in "write a temporary file, then rename it over the checkpoint".
                moved = self.aside(target)
                moved.parent.mkdir(parents=True, exist_ok=True)
                return original(self.aside(source), moved, *args, **kwargs)
            if self._was_there(source):
                self._keep(source)
                self._gone.add(_absolute(source))
                return None
            if not self._was_there(target):
                return original(source, target, *args, **kwargs)
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


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - the path need not exist, nor be resolved


def _now_on_disk(folder: Path) -> float:
    """The present moment on the clock that stamps files, which may be another machine's."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_ctime
