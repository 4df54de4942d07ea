"""Which folders Fulltilt may write into, and which entries in them it may replace or remove.

All commands, recipes and caches write through this module. A folder is ours if Fulltilt made it, found it empty, or
finds its marker `.fulltilt` in it. The marker lists each entry that Fulltilt made in it, with inode, size and time:
anything else, also a file that replaced one of Fulltilt's, stays as it is. No symlink in the folder is followed. The
marker is only appended to, so that several processes may write into a folder.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import stat
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from fulltilt.errors import ForeignFiles, MachineError, RunFolderError, UsageError

try:
    import fcntl
except ImportError:  # Windows: two jobs in one folder are not told apart there
    fcntl = None  # type: ignore[assignment]

MARKER = ".fulltilt"
# How many foreign names are shown; the rest is counted.
_SHOWN = 5
# Flags for opening any file: do not block on a named pipe, do not change newlines on Windows.
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)

# Inode, size and time; of a folder or a growing file only the inode; of a file that is written often, empty.
Identity = tuple[int, ...]

# What this process knows of each folder besides its marker: the state of files that it writes again and again.
_known: dict[Path, OwnedFolder] = {}
# Checkpoints may be written in the background: two threads may note entries of one folder.
_mutex = threading.RLock()
# Descriptors that hold a lock. A loader worker that outlives a killed training must not keep it with a copy.
_locks: set[int] = set()


def _after_fork() -> None:
    global _mutex
    _mutex = threading.RLock()
    _known.clear()
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class OwnedFolder:
    """A folder of Fulltilt's own. An entry is given by its name in the folder (a string), or by its path."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self._entries: dict[str, Identity] = {}
        self._versions: dict[str, set[Identity]] = {}  # all that were noted: a kill may come before a new one is there
        self._marker_inode: int | None = None
        self._read_bytes = 0
        self._copied = False
        self._update()

    @classmethod
    def claim(cls, path: str | Path, kind: str, *, flag: str = "--out", mode: int = 0o777) -> OwnedFolder:
        """Make the folder, or take it over if it is empty or has the marker of this kind.

        Raises ForeignFiles for a folder with other files, UsageError for a file or another kind of folder, MachineError
        where others could write into it.
        """
        path = Path(path)
        try:
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            _check_access(path, flag)
            names = sorted(name for name in os.listdir(path) if not name.startswith(MARKER + "."))
            # Another machine may just have made the marker: a listing of a network folder can be outdated.
            if MARKER not in names and kind_of(path) is None:
                if names:
                    raise _foreign(path, names, flag)
                _write_marker(path, kind)
            found = kind_of(path)
            if found is None:
                raise _foreign(path, names, flag)
            if found != kind:
                raise UsageError(f"{path} holds a {found}, not a {kind}", f"Choose another folder with {flag}.")
            return cls(path)
        except FileExistsError as error:
            raise UsageError(f"{flag} {path} is a file, not a folder", f"Choose another folder with {flag}.") from error
        except OSError as error:
            raise RunFolderError(
                f"cannot write into {path}: {error.strerror or error}", f"Choose another folder with {flag}."
            ) from error

    @classmethod
    def claim_private(cls, path: Path, kind: str, *, flag: str) -> OwnedFolder:
        """Like ``claim``, for a folder inside one that others may write: only this user may write into it.

        Raises MachineError where somebody else has put a folder or a link there.
        """
        with contextlib.suppress(OSError):  # claim reports what is wrong
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
        if os.path.lexists(path) and not is_private(path, follow=False):
            raise MachineError(
                f"{path} is not a folder that only this user may write", f"Remove it, or choose another {flag}."
            )
        return cls.claim(path, kind, flag=flag)

    @classmethod
    def around(cls, path: Path) -> OwnedFolder | None:
        """The owned folder that contains ``path``, at any depth; None when there is none."""
        for folder in Path(os.path.abspath(path)).parents:  # resolve() would follow links
            if kind_of(folder) is not None:
                return _known.setdefault(folder, cls(folder)) if folder not in _known else _known[folder]
        return None

    @contextlib.contextmanager
    def locked(self, busy: str, *, wait: bool = False) -> Iterator[None]:
        """Hold the folder's lock. If another process holds it: raise UsageError with ``busy``, or ``wait``."""
        fd = os.open(self.path / MARKER, os.O_RDWR | NO_FOLLOW)  # NFS needs write access to lock
        _locks.add(fd)
        try:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a file system without locks
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                    except BlockingIOError as error:
                        raise UsageError(busy, "Wait for it, or choose another folder.") from error
            yield
        finally:
            if fd in _locks:  # else this is a fork
                _locks.discard(fd)
                if fcntl is not None:
                    with contextlib.suppress(OSError):
                        fcntl.flock(fd, fcntl.LOCK_UN)  # also for a fork that has not closed it yet
                os.close(fd)

    def owns(self, entry: str | Path) -> bool:
        """Whether the entry exists, Fulltilt made it, and nobody has replaced it."""
        name = self._name(entry)
        found = _identity(self.path / name)
        if found is None or not self._reached_without_links(name):
            return False
        if not self._matches(name, found):
            self._update()
        return self._matches(name, found)

    def check(self, entry: str | Path) -> Path:
        """The path of an entry that is ours or does not exist, and so may be written. Raises ForeignFiles."""
        name = self._name(entry)
        path = self.path / name
        if not self._reached_without_links(name) or (os.path.lexists(path) and not self.owns(name)):
            raise ForeignFiles(f"{path} was not written by Fulltilt and is left as it is", "Move it elsewhere.")
        return path

    def announce(self, *entries: str | Path) -> None:
        """Note the names of entries before they are made, in case of a kill in between. Raises ForeignFiles."""
        names = [self._name(self.check(entry)) for entry in entries]
        self._update()
        self._note({name: () for name in names if self._entries.get(name) != ()})

    def record(self, *entries: str | Path, growing: bool = False) -> None:
        """Note that Fulltilt made these entries, right after they were made.

        A ``growing`` file is known by its inode until it is recorded again.
        """
        self._note({(name := self._name(entry)): _identity(self.path / name, growing) for entry in entries})

    def record_tree(self, folder: str | Path) -> None:
        """Note a folder with everything in it, which Fulltilt, or a library for it, has just made."""
        name = self._name(folder)
        self.record(name, *(f"{name}/{inner}" for inner in _entries_below(self.path / name)))

    def make(self, folder: str | Path, mode: int = 0o777) -> Path:
        """An owned folder inside, made unless it exists. Raises ForeignFiles."""
        path = self.check(folder)
        if parent := os.path.dirname(name := self._name(folder)):
            self.make(parent, mode)
        if not path.is_dir():
            self.announce(name)
            with contextlib.suppress(FileExistsError):  # another process of this job was first
                path.mkdir(mode)
            self.record(name)
        return path

    def temporary(self, beside: str | Path) -> Path:
        """An unused hidden path next to an entry."""
        return _beside(self.path / self._name(beside))

    def create(self, entry: str | Path, mode: int = 0o666) -> int:
        """A descriptor of a new owned file, for reading and writing. Raises ForeignFiles if it exists."""
        path = self.check(entry)
        try:
            if os.path.lexists(path):
                raise FileExistsError
            self.announce(entry)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW, mode)
        except FileExistsError:
            raise ForeignFiles(f"{path} exists already and is left as it is", "Move it elsewhere.") from None
        self.record(entry, growing=True)
        return fd

    def append(self, entry: str | Path, mode: int = 0o666) -> int:
        """A descriptor that appends to an owned file, made if it does not exist. Raises ForeignFiles."""
        path = self.check(entry)
        if not os.path.lexists(path):
            self.announce(entry)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW, mode)
        self.record(entry, growing=True)
        return fd

    def write(self, entry: str | Path, data: bytes, mode: int = 0o666, again: bool = False) -> None:
        """Write a file atomically: it holds either the old content or all of ``data``. Raises ForeignFiles.

        Of a file that is written ``again`` and again the marker has only the name; this process knows the rest.
        """
        path = self.check(entry)
        with _written_beside(path, data, mode) as temporary:
            self.move(temporary, entry, again)

    def move(
        self,
        source: str | Path,
        target: str | Path,
        again: bool = False,
        growing: bool = False,
        aside: str | Path | None = None,
    ) -> None:
        """Rename an owned entry, with everything recorded in it, to a new name or over an owned file.

        The new name is noted before the rename, in case of a kill in between. A ``growing`` file stays known by its
        inode. A folder at ``target`` gets the name ``aside``; if anything fails it keeps its own.
        """
        path = self.check(target)
        old, new = self._name(source), self._name(target)
        identity = _identity(self.path / old, growing)
        if not again:
            noted = self._renamed(old, new)
            if aside is not None:
                there = [name for name in self._renamed(new, new) if self.owns(name)]
                noted |= {self._name(aside) + name[len(new) :]: _identity(self.path / name) for name in there}
            self._note({**noted, new: identity})
        elif new not in self._entries:
            self._note({new: ()})
        if aside is not None:
            path.replace(self.path / aside)
        try:
            (self.path / old).replace(path)
        except OSError:
            if aside is not None:
                (self.path / aside).replace(path)
            raise
        if identity is not None:
            self._entries[new] = identity
        self._note(dict.fromkeys(self._renamed(old, old)))

    def _renamed(self, old: str, new: str) -> dict[str, Identity | None]:
        """What is noted of an entry and everything in it, by its names once it is renamed."""
        with _mutex:
            return {
                new + name[len(old) :]: identity
                for name, identity in self._entries.items()
                if name == old or name.startswith(old + "/")
            }

    def remove(self, entry: str | Path) -> bool:
        """Remove an owned entry and everything owned in it; True when nothing is left. Files of others stay."""
        name = self._name(entry)
        path = self.path / name
        if not os.path.lexists(path):
            return True
        if not self.owns(name):
            return False
        self._update()
        others = list(self._entries) if _is_folder(path) else []
        below = sorted((other for other in others if other.startswith(name + "/")), reverse=True)
        gone = []
        for inner in [*below, name]:
            if not os.path.lexists(self.path / inner):
                gone.append(inner)
            elif self.owns(inner):
                with contextlib.suppress(OSError):  # not empty, or not allowed
                    target = self.path / inner
                    target.rmdir() if _is_folder(target) else target.unlink()
                    gone.append(inner)
        self._note(dict.fromkeys(gone))
        return not os.path.lexists(path)

    def remove_all(self) -> bool:
        """Remove all owned entries, and the folder itself if nothing is left; True when it is gone."""
        for name in self.entries():  # folders come before what is in them, and are removed with it
            self.remove(name)
        with contextlib.suppress(OSError):
            if os.listdir(self.path) == [MARKER]:
                (self.path / MARKER).unlink()
                self.path.rmdir()
        return not os.path.lexists(self.path)

    def entries(self) -> list[str]:
        """The names of all existing owned entries."""
        self._update()
        return sorted(name for name in list(self._entries) if self.owns(name))

    # ------------------------------------------------------------------ the marker

    def _name(self, entry: str | Path) -> str:
        path = os.path.abspath(entry) if isinstance(entry, Path) else os.path.join(self.path, entry)
        name = Path(os.path.relpath(path, self.path)).as_posix()
        if name.split("/")[0] in ("..", ".", MARKER):
            raise ValueError(f"{entry} is not an entry below {self.path}")
        return name

    def _reached_without_links(self, name: str) -> bool:
        return all(
            _is_folder(self.path / parent) or not os.path.lexists(self.path / parent)
            for parent in list(Path(name).parents)[:-1]
        )

    def _matches(self, name: str, found: Identity) -> bool:
        recorded = self._entries.get(name)
        if recorded is None:
            return False
        if found in self._versions.get(name, ()):
            return True
        known = slice(1, 2) if self._copied else slice(None)  # in a copy inodes and times are new, sizes are not
        return recorded[known] == found[: len(recorded)][known]

    def _note(self, entries: Mapping[str, Identity | None]) -> None:
        lines = [json.dumps({"path": name, "is": identity}) + "\n" for name, identity in entries.items()]
        if not lines:
            return
        with contextlib.suppress(FileNotFoundError):  # the folder was removed
            fd = os.open(self.path / MARKER, os.O_RDWR | os.O_APPEND | NO_FOLLOW)
            try:
                # A line torn by a kill must not merge with the next one.
                os.lseek(fd, -1, os.SEEK_END)
                torn = os.read(fd, 1) != b"\n"
                data = ("\n" * torn + "".join(lines)).encode()
                while data:  # on a full disk a part is written first
                    data = data[os.write(fd, data) :]
            finally:
                os.close(fd)
        self._update()

    def _update(self) -> None:
        """Read what this and other processes have noted since the last time, without a torn line."""
        with _mutex:
            self._read_marker()

    def _read_marker(self) -> None:
        try:
            file = open_plain(self.path / MARKER)
        except OSError:
            self._forget()
            return
        with file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._marker_inode:  # the first time, or the folder was made again
                self._marker_inode, self._read_bytes = inode, 0
                self._forget()
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        first = self._read_bytes == 0
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            try:
                noted = json.loads(line)
                if first and "folder" in noted:
                    self._copied = noted["folder"] != self.path.stat().st_ino
                    first = False
                    continue
                name, identity = noted["path"], noted["is"]
                if identity is None:
                    self._entries.pop(name, None)
                    self._versions.pop(name, None)
                elif not {"", ".", ".."} & set(name.split("/")):  # otherwise the marker was forged
                    self._entries[str(name)] = identity = tuple(int(part) for part in identity)
                    self._versions.setdefault(name, set()).add(identity)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                continue

    def _forget(self) -> None:
        self._entries.clear()
        self._versions.clear()


def write_named_file(
    path: Path, data: bytes, mode: int = 0o666, signature: bytes | None = None, keep_owner: bool = False
) -> None:
    """Write a single file that the user named, outside of any owned folder.

    An existing file is replaced only if its first 4 KiB hold the ``signature``; raises ForeignFiles otherwise.
    """
    if os.path.lexists(path):
        ours = False
        with contextlib.suppress(OSError), open_plain(path) as file:
            ours = signature is not None and signature in file.read(4096)
        if not ours:
            raise ForeignFiles(f"{path} exists and was not written by Fulltilt", "Choose another name.")
    with _written_beside(path, data, mode) as temporary:
        if keep_owner:
            _copy_owner(path, temporary)
        temporary.replace(path)


def _copy_owner(source: Path, target: Path) -> None:
    """Give the target the owner, mode and extended attributes of the source, as far as this user may."""
    status = source.stat()
    with contextlib.suppress(OSError):
        os.chown(target, status.st_uid, status.st_gid)
    target.chmod(status.st_mode)
    with contextlib.suppress(OSError, AttributeError):  # not everywhere
        for name in os.listxattr(source):
            os.setxattr(target, name, os.getxattr(source, name))


@contextlib.contextmanager
def _written_beside(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """A new hidden file with ``data`` next to ``path``, to be renamed; removed if that fails."""
    temporary = _beside(path)
    try:
        _write_new(temporary, data, mode)
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):  # a folder that may not be written
            temporary.unlink()
        raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def open_plain(path: Path, *, follow: bool = False) -> io.BufferedReader:
    """A regular file for reading; ``follow`` allows a link. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | (NO_FOLLOW & ~getattr(os, "O_NOFOLLOW", 0) if follow else NO_FOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, which is not followed here", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(fd, "rb")


def kind_of(folder: Path) -> str | None:
    """The kind of folder by Fulltilt's marker; None without a marker that can be trusted."""
    try:
        file = open_plain(folder / MARKER)
    except OSError:
        return None
    with file:
        if _uid() not in (None, 0, os.fstat(file.fileno()).st_uid):
            return None
        try:
            kind = json.loads(file.readline(4096))["fulltilt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
    return kind if isinstance(kind, str) else None


def is_private(folder: Path, *, follow: bool = True) -> bool:
    """Whether the folder belongs to this user and is not writable for everybody."""
    try:
        status = folder.stat(follow_symlinks=follow)
    except OSError:
        return False
    mine = _uid() in (None, status.st_uid) and not (_uid() is not None and status.st_mode & stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and mine


def _write_marker(folder: Path, kind: str) -> None:
    """Write the marker atomically; of several processes that start together, one writes it."""
    header = json.dumps({"fulltilt": kind, "folder": folder.stat().st_ino}) + "\n"
    whole = folder / f"{MARKER}.{uuid.uuid4().hex[:12]}"
    _write_new(whole, header.encode(), 0o644)
    try:
        os.link(whole, folder / MARKER)
    except FileExistsError:
        pass  # another process of this job was first
    except OSError:  # a file system without links
        if not os.path.lexists(folder / MARKER):
            whole.replace(folder / MARKER)
    whole.unlink(missing_ok=True)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, mode)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def _check_access(folder: Path, flag: str) -> None:
    """Raises MachineError for another user's folder, or one that everybody may write."""
    status = folder.stat()
    uid = _uid()
    if uid is None:
        return
    if uid not in (0, status.st_uid):
        raise MachineError(f"{folder} belongs to another user", f"Choose another folder with {flag}.")
    if status.st_mode & stat.S_IWOTH:
        raise MachineError(
            f"every user of this machine may write into {folder}",
            f"Choose a new folder inside it with {flag}, or take the right away: chmod o-w {folder}",
        )


def _uid() -> int | None:
    return os.geteuid() if hasattr(os, "geteuid") else None


def _identity(path: Path, growing: bool = False) -> Identity | None:
    try:
        status = path.lstat()
    except (OSError, ValueError):  # missing, or not a valid name
        return None
    if growing or stat.S_ISDIR(status.st_mode):
        return (status.st_ino,)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _entries_below(folder: Path) -> Iterator[str]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        yield entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from (f"{entry.name}/{inner}" for inner in _entries_below(Path(entry.path)))


def _foreign(folder: Path, names: list[str], flag: str) -> ForeignFiles:
    shown = ", ".join(ascii(name)[1:-1] for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ForeignFiles(
        f"{folder} holds files that Fulltilt did not write: {shown}{more}",
        f"Choose a new or empty folder, for example {flag} {folder / 'fulltilt'}",
    )
