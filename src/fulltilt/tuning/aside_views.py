"""Inside a trial: what the job has saved aside is there to it, as in a training of its own.

| entry point                                        | in a trial                                                 |
|----------------------------------------------------|------------------------------------------------------------|
| os.stat, access, … of what this trial wrote aside  | finds it there                                             |
| os.stat, access, … of what it has removed          | finds nothing, although it is there still                  |
| os.listdir, os.scandir (glob, Path.iterdir, …)     | show what this trial wrote aside too, not what it removed  |
| os.chmod, chown, utime, setxattr                   | changes what was written aside, never what was there before|
| shutil.copy, os.symlink, os.link of what it wrote  | the copy goes aside too; a link is one more copy           |
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulltilt.tuning.users_files import Guard, UsersFiles

_scandir = os.scandir  # as it is before it shows what lies aside


class AsideViews:
    """The guards of one trial's files."""

    def __init__(self, files: UsersFiles) -> None:
        self._files = files

    def guards(self) -> Iterator[tuple[Any, str, Guard]]:
        """Where to stand: the module, the name of the call, and what to make of it."""
        for name in ("stat", "lstat"):
            yield os, name, self._looking
        for name in ("access", "listxattr", "getxattr"):
            if hasattr(os, name):  # some are not on every system
                yield os, name, self._following
        for name in ("chmod", "chown", "utime", "setxattr"):
            if hasattr(os, name):
                yield os, name, self._touching
        yield os, "listdir", self._listing
        yield os, "scandir", self._scanning
        for name in ("copy", "copy2", "copyfile"):
            yield shutil, name, self._copying
        for name in ("symlink", "link"):
            yield os, name, self._linking

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is None:
                self._files.removals.refuse_hidden(path)
            try:
                return original(path, *args, **kwargs)
            except FileNotFoundError:
                # Files alone: a folder that is not there must still be made before other things are written into it.
                if kwargs.get("dir_fd") is None and self._files.is_path(path) and self._files.aside(path).is_file():
                    return original(self._files.aside(path), *args, **kwargs)
                raise

        return stat

    def _following(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def follow(path: Any, *args: Any, **kwargs: Any) -> Any:
            if original.__name__ == "access" and self._files.removals.is_hidden(path):
                return False
            self._files.removals.refuse_hidden(path)
            return original(self._files.where(path), *args, **kwargs)

        return follow

    def _touching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Rights, owner and times: of the copy aside if there is one, never of what was there."""

        def touch(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None or not self._files.is_path(path):
                return original(path, *args, **kwargs)
            if self._files.aside(path).is_file():
                return original(self._files.aside(path), *args, **kwargs)
            return None if self._files.was_there(path, follow=True) else original(path, *args, **kwargs)

        return touch

    def _copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def copy(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            is_aside = self._files.is_path(source) and self._files.aside(source).is_file()
            if not is_aside or not self._files.is_path(target):
                return original(source, target, *args, **kwargs)
            aside = self._files.aside(target)
            (aside if os.path.isdir(target) else aside.parent).mkdir(parents=True, exist_ok=True)  # noqa: PTH112
            self._files.diverted += 1
            original(self._files.aside(source), aside, *args, **kwargs)
            return target

        return copy

    def _linking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def link(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._files.is_path(source) or not self._files.is_path(target) or os.path.lexists(target):
                return original(source, target, *args, **kwargs)
            beside = os.path.join(os.path.dirname(os.fsdecode(target)), os.fsdecode(source))  # noqa: PTH118, PTH120
            goal = self._files.aside(beside if original.__name__ == "symlink" else source)
            if not goal.is_file():
                return original(source, target, *args, **kwargs)
            aside = self._files.aside(target)
            aside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(goal, aside)
            return None

        return link

    def _saved_in(self, folder: Any) -> list[Path]:
        """The files that this trial has written aside instead of into a folder."""
        if not isinstance(folder, str | os.PathLike) or not self._files.is_path(folder):
            return []
        try:
            with _scandir(self._files.aside(folder)) as entries:
                return [Path(entry.path) for entry in entries if entry.is_file()]
        except OSError:
            return []

    def _is_hidden_in(self, folder: Any, name: Any) -> bool:
        return not isinstance(folder, int) and self._files.removals.is_hidden(os.path.join(folder, name))  # noqa: PTH118

    def _listing(self, original: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def listdir(path: Any = ".") -> list[str]:
            self._files.removals.refuse_hidden(path)
            if not (saved := self._saved_in(path)) and not self._files.removals:
                return original(path)
            there = [name for name in _or_nothing(saved, lambda: original(path)) if not self._is_hidden_in(path, name)]
            return list(dict.fromkeys((*there, *(file.name for file in saved))))

        return listdir

    def _scanning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scandir(path: Any = ".") -> Any:
            self._files.removals.refuse_hidden(path)
            if not (saved := self._saved_in(path)) and not self._files.removals:
                return original(path)
            found = _or_nothing(saved, lambda: list(original(path)))
            there = [entry for entry in found if not self._is_hidden_in(path, entry.name)]
            names = {entry.name for entry in there}
            return Entries([*there, *(AsideEntry(os.fspath(path), file) for file in saved if file.name not in names)])

        return scandir


def _or_nothing(saved: list[Path], look: Callable[[], list[Any]]) -> list[Any]:
    """What is in a folder; a library may have made it aside only."""
    try:
        return look()
    except FileNotFoundError:
        if not saved:
            raise
        return []


class AsideEntry:
    """A file that was saved aside, as os.scandir() shows the others."""

    def __init__(self, folder: str, aside: Path) -> None:
        self.name = aside.name
        self.path = os.path.join(folder, aside.name)  # noqa: PTH118 - as os.scandir writes it
        self._aside = aside

    def __fspath__(self) -> str:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size and times of the file aside."""
        return self._aside.stat(follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """That of the file aside."""
        return self._aside.stat().st_ino

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        """Only files are shown."""
        return True

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        """Only files are shown."""
        return False

    def is_symlink(self) -> bool:
        """Only files are shown."""
        return False

    def is_junction(self) -> bool:
        """Only files are shown."""
        return False


class Entries:
    """What os.scandir() returns."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give no more."""
        self._entries = iter(())
