"""``stage_dir``: copies a data folder to tmpfs or a local disk if that pays, and deletes the copy at the end.

    <stage>/<name>-<key>/files/…    the copy
    <stage>/<name>-<key>/.fulltilt  the marker: what Fulltilt has put there, and may delete

A complete file gets, as its modification time, the time at which its original was last changed (ctime): after an
interruption the next run copies the files whose size or time differs, and removes those that the source no longer has.
The original's own modification time would not do: rsync and tar set it, also on a file with new content.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fulltilt.errors import DataError, MachineError, UsageError
from fulltilt.feed.disk_cache import free_disk_bytes
from fulltilt.feed.progress import progress
from fulltilt.figures import size as in_words
from fulltilt.probes.storage import read_storage
from fulltilt.records import StorageReading
from fulltilt.store.owned_folder import OwnedFolder

_FILES = "files"
# The share left free on the stage: a full /dev/shm breaks DataLoader workers, a full tmpfs uses up the RAM.
_SPARE_SHARE = 0.1
_COPIERS = 8


def staging_pays(source: StorageReading, epochs: int, free_bytes: int | None) -> tuple[bool, str]:
    """Whether staging pays, and why, from measurements of the source."""
    if source.kind == "tmpfs":
        return False, "the data is in memory already"
    if source.total_bytes is None or not source.counted_fully:
        return False, "the folder is too large to count in the time allowed"
    if free_bytes is not None and source.total_bytes > free_bytes * (1 - _SPARE_SHARE):
        return False, f"{in_words(source.total_bytes)} do not fit into {in_words(free_bytes)} free"
    if epochs < 2:
        return False, "every file is read once, and copying reads it once more"
    if source.kind in ("network", "hdd"):
        return True, f"the data is on {source.kind} and is read {epochs} times"
    if source.fits_in_ram:
        return False, f"the page cache keeps {in_words(source.total_bytes)} after the first epoch anyway"
    cold, warm = source.small_cold_files_per_s, source.small_warm_files_per_s
    if cold is None or warm is None:
        return False, "reads without the page cache could not be measured; when='always' copies anyway"
    if warm > 2 * cold:
        return True, f"{warm:.0f} files/s from memory against {cold:.0f} from the disk"
    return False, f"the disk gives {cold:.0f} files/s, memory {warm:.0f}: too little to gain"


def stage_dir(
    data: str | Path,
    stage: str | Path = "/dev/shm",
    *,
    when: str = "auto",
    epochs: int = 10,
) -> StagedFolder:
    """Copy ``data`` into ``stage`` if it pays (``when``: auto, always, never); read from ``.path`` in either case.

    A context manager that deletes the copy at its end. Raises UsageError, DataError, MachineError.
    """
    source = Path(data)
    if when not in ("auto", "always", "never"):
        raise UsageError(f"when is {when!r}", "Choose auto, always or never.")
    if not source.is_dir():
        raise UsageError(f"the data folder {source} does not exist")
    if when == "never":
        return StagedFolder(source, None, "not asked for")
    stage_path = Path(stage)
    if stage_path.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"the stage {stage_path} is within the data folder {source}", "Choose one outside of it.")
    free = free_disk_bytes(stage_path)
    pays, reason = (True, "asked for") if when == "always" else staging_pays(read_storage(source), epochs, free)
    if not pays:
        return StagedFolder(source, None, reason)
    files = list(_files_below(source))
    key = hashlib.blake2b(os.fsencode(source.resolve()), digest_size=6).hexdigest()
    target = stage_path / f"{source.name}-{key}"
    need = sum(size for _, size, _ in _missing(target, files))
    if free is not None and need > free * (1 - _SPARE_SHARE):
        raise MachineError(
            f"staging needs {in_words(need)}; {stage_path} has {in_words(free)} free",
            "Stage to a larger file system, or train from the original folder.",
        )
    copied, locks = _copy_all(source, target, files)
    if copied is None:
        return StagedFolder(source, None, f"another job reads {target}, which has files that the source no longer has")
    return StagedFolder(target / _FILES, target, f"{reason}; {copied} of {len(files)} files copied", locks)


@dataclass(frozen=True)
class StagedFolder:
    """Where to read the data: the copy, or the original (``reason`` says why)."""

    path: Path
    folder: Path | None
    reason: str
    _locks: list[int] = field(default_factory=list, repr=False, compare=False)  # descriptors, until it is cleaned

    @property
    def staged(self) -> bool:
        """Whether ``path`` is a copy."""
        return self.folder is not None

    def clean(self) -> None:
        """Delete the copy, never the original. Of several jobs or ranks that read it, the last one deletes it."""
        if self.folder is not None and self._locks:
            _leave(OwnedFolder(self.folder), self._locks)

    def __enter__(self) -> StagedFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.clean()


# --------------------------------------------------------------------------- copying

_File = tuple[str, int, int]  # path relative to the folder, size, time of the last change (ctime) in ns


def _copy_all(source: Path, target: Path, files: list[_File]) -> tuple[int | None, list[int]]:
    """Remove what the source no longer has and copy what is missing.

    Returns how many files were copied, and two descriptors: the lock on the copy is held from before the copying, the
    one on its files while they are read. None if another job reads a file that would have to be removed.
    """
    # Everybody may write to /dev/shm: the folder must be private.
    owned = OwnedFolder.claim_private(target, "staged copy", flag="stage")

    def copy(file: _File) -> None:
        name, size, time_ns = file
        final = target / _FILES / name
        final.parent.mkdir(parents=True, exist_ok=True)
        final.unlink(missing_ok=True)  # it may be a link
        shutil.copyfile(source / name, final)
        if final.stat().st_size != size:
            raise DataError(f"{source / name} did not arrive whole in {target}", "It may be changing meanwhile.")
        os.utime(final, ns=(time_ns, time_ns))

    copied = {parent for name, _, _ in files for parent in (Path(name), *Path(name).parents)} - {Path()}
    wanted = {_FILES, *(f"{_FILES}/{path}" for path in copied)}
    locks = [os.open(target, os.O_RDONLY)]
    try:
        fcntl.flock(locks[0], fcntl.LOCK_SH)
        with owned.locked("", wait=True), ThreadPoolExecutor(_COPIERS) as copiers:
            locks.append(os.open(owned.make(_FILES), os.O_RDONLY))
            present = (path.relative_to(target).as_posix() for path in (target / _FILES).rglob("*"))
            stale = [name for name in present if name not in wanted and owned.owns(name)]
            if stale and not _alone(locks[1]):
                _leave(owned, locks)
                return None, []
            for name in stale:
                owned.remove(name)
            fcntl.flock(locks[1], fcntl.LOCK_SH)
            missing = _missing(target, files)
            owned.announce(*wanted)
            for _ in progress(copiers.map(copy, missing), len(missing), f"Staging {source.name}"):
                pass
    except BaseException as error:
        while locks:
            os.close(locks.pop())
        if not isinstance(error, OSError):
            raise
        raise MachineError(
            f"staging to {target} failed: {error.strerror or error}",
            "The next run goes on with what was copied; free some space, or train from the original folder.",
        ) from error
    return len(missing), locks


def _alone(lock: int) -> bool:
    """Whether no other job holds a lock there; gives up the shared lock in any case."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _leave(copy: OwnedFolder, locks: list[int]) -> None:
    """Give up the locks on a copy; the last job deletes it."""
    if _alone(locks[0]):
        copy.remove_all()
    while locks:
        os.close(locks.pop())


def _missing(target: Path, files: list[_File]) -> list[_File]:
    """The files that are not complete in the copy: those have its size and the time of its last change."""

    def is_whole(file: _File) -> bool:
        with contextlib.suppress(OSError):
            status = (target / _FILES / file[0]).lstat()
            return (status.st_size, status.st_mtime_ns) == file[1:]
        return False

    return [file for file in files if not is_whole(file)]


def _files_below(folder: Path, below: str = "", above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[_File]:
    """All files below ``folder``, links followed; circles of links and what cannot be read are left out."""
    with contextlib.suppress(OSError):
        here = (folder / below).stat()
        if (here.st_dev, here.st_ino) in above:
            return
        above |= {(here.st_dev, here.st_ino)}
        for entry in sorted(os.scandir(folder / below), key=lambda entry: entry.name):
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir():
                yield from _files_below(folder, name, above)
                continue
            with contextlib.suppress(OSError):  # a dangling link is not data
                yield name, entry.stat().st_size, entry.stat().st_ctime_ns
