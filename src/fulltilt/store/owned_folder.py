"""Which folders Fulltilt may write into, and which entries in them it may replace or remove.

Every verb, recipe and cache goes through here. A folder is ours when Fulltilt made it, found it empty, or finds its
marker `.fulltilt` in it. The marker lists each entry that Fulltilt has made below the folder with its inode, size and
time: what somebody else has put there, also in the place of one of ours, is theirs and stays as it is. No symlink
below the folder is followed. The marker is only ever appended to, so that several processes may write into a folder.
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
# Names shown of what is in the way; the rest is counted.
_SHOWN = 5
# How every file is opened: a named pipe in its place must not hold us up. Windows would change newlines.
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)

# Inode, size and time. Of a folder and of a file that grows: the inode. Of one that is written often: nothing.
Identity = tuple[int, ...]


# What this process knows of each folder besides its marker: the state of files that it writes again and again.
_known: dict[Path, OwnedFolder] = {}
# A checkpoint is written beside the training: two threads may note entries of one folder.
_mutex = threading.RLock()
# Descriptors that hold a lock. A loader worker that outlives a killed training must not hold it with a copy.
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
    """A folder of Fulltilt's own. An entry is given by its name below the folder (a string), or by its path."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self._entries: dict[str, Identity] = {}
        self._marker_inode: int | None = None
        self._read_bytes = 0
        self._copied = False
        self._update()

    @classmethod
    def claim(cls, path: str | Path, kind: str, *, flag: str = "--out", mode: int = 0o777) -> OwnedFolder:
        """Make the folder, or take it over where it is empty or bears the marker of this kind.

        Raises ForeignFiles with what lies there, UsageError for a file or another kind of folder, MachineError where
        the system refuses.
        """
        path = Path(path)
        try:
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            _check_access(path, flag)
            names = sorted(name for name in os.listdir(path) if not name.startswith(MARKER + "."))
            # Another machine may have made it just now: a listing of a network folder can be older than the file.
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
        """Like ``claim``, for a folder that we name inside one that others may write: it must be this user's alone.

        Raises MachineError where somebody else has put a folder or a link there.
        """
        with contextlib.suppress(OSError):  # claim says what is wrong
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
        if os.path.lexists(path) and not is_private(path, follow=False):
            raise MachineError(
                f"{path} is not a folder that only this user may write", f"Remove it, or choose another {flag}."
            )
        return cls.claim(path, kind, flag=flag)

    @classmethod
    def around(cls, path: Path) -> OwnedFolder | None:
        """The owned folder that ``path`` lies in, however deep; None when there is none."""
        for folder in Path(os.path.abspath(path)).parents:  # resolve() would follow links
            if kind_of(folder) is not None:
                return _known.setdefault(folder, cls(folder)) if folder not in _known else _known[folder]
        return None

    @contextlib.contextmanager
    def locked(self, busy: str, *, wait: bool = False) -> Iterator[None]:
        """Keep other processes that ask for the lock out. Raises UsageError saying ``busy`` where another has it.

        With ``wait`` it waits for the other instead.
        """
        fd = os.open(self.path / MARKER, os.O_RDWR | NO_FOLLOW)  # NFS locks only what may be written
        _locks.add(fd)
        try:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a file system without locks; there is no telling
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
                        fcntl.flock(fd, fcntl.LOCK_UN)  # a fork that has not closed it yet does not keep it
                os.close(fd)

    def owns(self, entry: str | Path) -> bool:
        """Whether the entry is there, Fulltilt made it, and nobody has put another in its place."""
        name = self._name(entry)
        found = _identity(self.path / name)
        if found is None or not self._reached_without_links(name):
            return False
        if not self._matches(name, found):
            self._update()
        return self._matches(name, found)

    def check(self, entry: str | Path) -> Path:
        """The path of an entry that may be written: it is ours or not there. Raises ForeignFiles."""
        name = self._name(entry)
        path = self.path / name
        if not self._reached_without_links(name) or (os.path.lexists(path) and not self.owns(name)):
            raise ForeignFiles(f"{path} was not written by Fulltilt and is left as it is", "Move it elsewhere.")
        return path

    def announce(self, *entries: str | Path) -> None:
        """Note by name what is about to be made: a kill in between leaves nothing unknown. Raises ForeignFiles."""
        names = [self._name(self.check(entry)) for entry in entries]
        self._update()
        self._note({name: () for name in names if self._entries.get(name) != ()})

    def record(self, *entries: str | Path, growing: bool = False) -> None:
        """Note that Fulltilt made these entries, as they are now. Call it right after they were made.

        A file that is ``growing`` is known by its inode until it is recorded once more.
        """
        self._note({(name := self._name(entry)): _identity(self.path / name, growing) for entry in entries})

    def record_tree(self, folder: str | Path) -> None:
        """Note a folder with all that lies in it: Fulltilt, or a library at its request, has just made it."""
        name = self._name(folder)
        self.record(name, *(f"{name}/{inner}" for inner in _entries_below(self.path / name)))

    def make(self, folder: str | Path, mode: int = 0o777) -> Path:
        """A folder of ours at this place, made unless it is there already. Raises ForeignFiles."""
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
        """A path next to an entry that nobody else uses, hidden, not yet made."""
        return _beside(self.path / self._name(beside))

    def create(self, entry: str | Path, mode: int = 0o666) -> int:
        """A descriptor of a new file of ours, for reading and writing. Raises ForeignFiles if something is there."""
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
        """A descriptor that appends to a file of ours, made where it is not there. Raises ForeignFiles."""
        path = self.check(entry)
        if not os.path.lexists(path):
            self.announce(entry)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW, mode)
        self.record(entry, growing=True)
        return fd

    def write(self, entry: str | Path, data: bytes, mode: int = 0o666, again: bool = False) -> None:
        """Write a file whole: afterwards it holds either what it held or all of ``data``. Raises ForeignFiles.

        Of a file that is written ``again`` and again the marker knows the name only; this process knows the rest.
        """
        path = self.check(entry)
        with _written_beside(path, data, mode) as temporary:
            self.move(temporary, entry, again)

    def move(self, source: str | Path, target: str | Path, again: bool = False, growing: bool = False) -> None:
        """Rename an entry of ours, with all that is recorded below it, over a file of ours or to a free place.

        The new place is noted before the rename: a kill in between leaves nothing that is not known. A file that is
        ``growing`` goes on being known by its inode.
        """
        path = self.check(target)
        old, new = self._name(source), self._name(target)
        identity = _identity(self.path / old, growing)
        with _mutex:
            below = {name: is_ for name, is_ in self._entries.items() if name.startswith(old + "/")}
        if not again:
            inner = {new + name[len(old) :]: is_ for name, is_ in below.items()}
            self._note({new: identity, **inner})
        elif new not in self._entries:
            self._note({new: ()})
        (self.path / old).replace(path)
        if identity is not None:
            self._entries[new] = identity
        self._note({name: None for name in (old, *below) if name in self._entries})

    def remove(self, entry: str | Path) -> bool:
        """Remove an entry of ours with all of ours below it; True when nothing is left. What others put there stays."""
        name = self._name(entry)
        path = self.path / name
        if not os.path.lexists(path):
            return True
        if not self.owns(name):
            return False
        self._update()
        below = sorted((other for other in list(self._entries) if other.startswith(name + "/")), reverse=True)
        gone = []
        for inner in [*below, name]:
            if not os.path.lexists(self.path / inner):
                gone.append(inner)
            elif self.owns(inner):
                with contextlib.suppress(OSError):  # not empty, or not allowed: it stays
                    target = self.path / inner
                    target.rmdir() if _is_folder(target) else target.unlink()
                    gone.append(inner)
        self._note(dict.fromkeys(gone))
        return not os.path.lexists(path)

    def remove_all(self) -> bool:
        """Remove all of ours and then, where nothing is left, the folder itself; True when it is gone."""
        for name in sorted(self.entries(), reverse=True):
            self.remove(name)
        with contextlib.suppress(OSError):
            if os.listdir(self.path) == [MARKER]:
                (self.path / MARKER).unlink()
                self.path.rmdir()
        return not os.path.lexists(self.path)

    def entries(self) -> list[str]:
        """The names of all that Fulltilt has made below the folder and that is still there and ours."""
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
        # In a copy of the folder all inodes are new: there the names have to do.
        return recorded is not None and (self._copied or recorded == found[: len(recorded)])

    def _note(self, entries: Mapping[str, Identity | None]) -> None:
        lines = [json.dumps({"path": name, "is": identity}) + "\n" for name, identity in entries.items()]
        if not lines:
            return
        with contextlib.suppress(FileNotFoundError):  # the folder was taken away: nothing to protect
            fd = os.open(self.path / MARKER, os.O_RDWR | os.O_APPEND | NO_FOLLOW)
            try:
                # A line that a kill has torn must not swallow the next one.
                os.lseek(fd, -1, os.SEEK_END)
                torn = os.read(fd, 1) != b"\n"
                os.write(fd, ("\n" * torn + "".join(lines)).encode())
            finally:
                os.close(fd)
        self._update()

    def _update(self) -> None:
        """Take in what this and other processes have noted since the last time. A torn line is left out."""
        with _mutex:
            self._read_marker()

    def _read_marker(self) -> None:
        try:
            file = open_plain(self.path / MARKER)
        except OSError:
            self._entries.clear()
            return
        with file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._marker_inode:  # the first time, or the folder was made again
                self._marker_inode, self._read_bytes = inode, 0
                self._entries.clear()
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
                elif not {"", ".", ".."} & set(name.split("/")):  # else it is of a marker that others have written
                    self._entries[str(name)] = tuple(int(part) for part in identity)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                continue


def write_named_file(path: Path, data: bytes, mode: int = 0o666, signature: bytes | None = None) -> None:
    """Write a single file that the user named, outside of any folder of ours.

    An existing one is replaced only where its first 4 KiB hold the ``signature`` of what Fulltilt writes there;
    raises ForeignFiles for any other.
    """
    if os.path.lexists(path):
        ours = False
        with contextlib.suppress(OSError), open_plain(path) as file:
            ours = signature is not None and signature in file.read(4096)
        if not ours:
            raise ForeignFiles(f"{path} exists and was not written by Fulltilt", "Choose another name.")
    with _written_beside(path, data, mode) as temporary:
        temporary.replace(path)


@contextlib.contextmanager
def _written_beside(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """A new hidden file next to ``path`` that holds ``data``, to be renamed; gone again where that fails."""
    temporary = _beside(path)
    try:
        _write_new(temporary, data, mode)
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):  # where nothing may be written, nothing may be deleted either
            temporary.unlink()
        raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def open_plain(path: Path, *, follow: bool = False) -> io.BufferedReader:
    """A plain file for reading: no pipe or device, and no link unless it may be followed. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | (NO_FOLLOW & ~getattr(os, "O_NOFOLLOW", 0) if follow else NO_FOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, which is not followed here", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return open(fd, "rb")


def kind_of(folder: Path) -> str | None:
    """What kind of folder Fulltilt's marker makes this one; None without a marker that can be trusted."""
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
    """Whether it is a folder that belongs to this user and that not everybody may write."""
    try:
        status = folder.stat(follow_symlinks=follow)
    except OSError:
        return False
    mine = _uid() in (None, status.st_uid) and not (_uid() is not None and status.st_mode & stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and mine


def _write_marker(folder: Path, kind: str) -> None:
    """The marker appears whole or not at all; of several processes that begin together, one makes it."""
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
    """Raises MachineError where others could exchange what is written: another user's folder, or one open to all."""
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
    except (OSError, ValueError):  # not there, or no name at all
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
