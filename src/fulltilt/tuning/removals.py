"""Inside a trial: what the job deletes or moves of the user's stays, and is gone to the job.

| entry point                                        | in a trial                                                 |
|----------------------------------------------------|------------------------------------------------------------|
| os.remove, … of what was there before              | does nothing                                               |
| os.rename of a file that was there before          | makes a copy of it aside, if it is not too large           |
| os.replace of a new file over one that was there   | the new one goes to the scratch folder                     |
| open, stat, … of what was removed                  | does not find it (`aside_views.py`)                        |
| os.mkdir, symlink, link where something was removed| does nothing: to the job it is gone                        |
| os.link to what was there before                   | makes a symbolic link                                      |
| os.remove of what this trial wrote aside           | removes it there                                           |
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulltilt.tuning.users_files import Guard, UsersFiles

# As they are before anybody guards them.
_lstat, _symlink = os.lstat, os.symlink


class Removals:
    """The guards of one trial's files."""

    def __init__(self, files: UsersFiles) -> None:
        self._files = files
        self._gone: set[str] = set()
        self._made_again: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._gone)

    def guards(self) -> Iterator[tuple[Any, str, Guard]]:
        """Where to stand: the module, the name of the call, and what to make of it."""
        for name in ("remove", "unlink", "rmdir", "truncate"):
            yield os, name, self._keeping
        yield shutil, "rmtree", self._removing_tree
        for name in ("rename", "replace"):
            yield os, name, self._moving
        yield os, "mkdir", self._making_folder
        for name in ("symlink", "link"):
            yield os, name, self._making_link

    # ------------------------------------------------------------------ what is gone to the job

    def _remove(self, path: Any) -> None:
        """To the job it is gone, with what it may have made there again."""
        self._files.keep(path)
        gone = absolute(path)
        self._gone.add(gone)
        self._made_again -= {made for made in self._made_again if made == gone or made.startswith(f"{gone}{os.sep}")}

    def _stays(self, path: Any) -> bool:
        """Whether the job has deleted something of the user's here: it is there still, and stays what it was."""
        return self.is_gone(path) and is_there(path)

    def is_gone(self, path: Any) -> bool:
        """Whether the job believes that it has deleted this, or a folder around it."""
        if not self._gone or not self._files.is_path(path):
            return False
        name = absolute(path)
        return any(name == gone or name.startswith(f"{gone}{os.sep}") for gone in self._gone)

    def is_hidden(self, path: Any) -> bool:
        """Whether the job has deleted this and made nothing in its place: to the job it is not there."""
        if not self.is_gone(path) or absolute(path) in self._made_again:
            return False
        return self._files.was_there(path) and not self._files.aside(path).is_file()

    def refuse_hidden(self, path: Any) -> None:
        """Raise what the system says of a path where nothing is, if that is how it is to the job."""
        if self.is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    # ------------------------------------------------------------------ the guards

    def _keeping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def keep(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None:  # part of an rmtree
                return original(path, *args, **kwargs)
            if not self._files.was_there(path):
                return original(self._files.where(path), *args, **kwargs)
            self._remove(path)
            return None

        return keep

    def _removing_tree(self, original: Callable[..., Any]) -> Callable[..., Any]:
        keep = self._keeping(original)

        def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
            keep(path, *args, **kwargs)
            if self._files.is_path(path) and self._files.aside(path).is_dir():
                original(self._files.aside(path), ignore_errors=True)

        return rmtree

    def _making_folder(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A folder that an earlier trial has made may be made once more, as in a training of its own."""

        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            is_users = kwargs.get("dir_fd") is None and self._files.is_path(path)
            if is_users and self._stays(path):
                self._made_again.add(absolute(path))
                return
            try:
                original(path, *args, **kwargs)
            except FileExistsError:
                if not is_users or not self._files.made.is_folder_of_a_trial(absolute(path)):
                    raise
            else:
                if is_users:
                    self._files.note(path)

        return mkdir

    def _making_link(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def link(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            if self._stays(target):
                return
            if original.__name__ == "link" and self._files.was_there(source):
                # A second name would change the file's time, and with it whose it seems to be.
                _symlink(absolute(source), target)
            else:
                original(source, target, *args, **kwargs)
            self._files.note(target, stays=False)

        return link

    def _moving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if self._files.is_path(source) and self._files.aside(source).exists():
                # Saved by this trial, as in "write a temporary file, then rename it over the checkpoint".
                moved = self._files.aside(target)
                moved.parent.mkdir(parents=True, exist_ok=True)
                original(self._files.aside(source), moved, *args, **kwargs)
                if is_there(source) and not self._files.was_there(source):
                    os.unlink(source)  # noqa: PTH108 - an empty one of mkstemp, into which it was saved
                return None
            if self._files.was_there(source):
                self._files.copy_aside(source, target)
                self._remove(source)
                return None
            if not self._files.was_there(target):
                moved = original(source, target, *args, **kwargs)
                self._files.note(target)
                return moved
            # Written by this trial and put over a file of the user's.
            self._files.keep(target)
            moved = self._files.aside(target)
            moved.parent.mkdir(parents=True, exist_ok=True)
            try:
                return original(source, moved, *args, **kwargs)
            except OSError:  # the scratch folder lies on another file system
                shutil.copyfile(source, moved)
                return os.unlink(source)  # noqa: PTH108

        return move


def is_there(path: Any) -> bool:
    """Whether anything is at a path, seen past the guards."""
    try:
        _lstat(path)
    except (OSError, ValueError):
        return False
    return True


def absolute(path: Any) -> str:
    """A path as text, from the root; not resolved, and it need not exist."""
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100
