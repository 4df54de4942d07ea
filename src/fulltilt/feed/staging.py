"""``stage_dir``: copies a data folder to tmpfs or a local disk if that pays, and deletes the copy at the end.

    <stage>/<name>-<key>/files/…    the copy; the key is of all names, sizes and times of change
    <stage>/<name>-<key>/whole      written last
    <stage>/<name>-<key>/.fulltilt  the marker: what Fulltilt has put there, and may delete

A copy is never changed: data that has changed gets another one, so that jobs which read the old one keep it. One that
was interrupted is made anew, one that no job reads any more is deleted by the next job.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fulltilt.errors import DataError, ForeignFiles, MachineError, UsageError
from fulltilt.feed.disk_cache import free_disk_bytes
from fulltilt.feed.progress import progress
from fulltilt.figures import count
from fulltilt.figures import size as in_words
from fulltilt.probes.storage import read_storage
from fulltilt.records import StorageReading
from fulltilt.store.owned_folder import OwnedFolder, is_private, kind_of

_FILES, _WHOLE = "files", "whole"
_KIND = "staged copy"
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
    key = hashlib.blake2b(repr((source.resolve(), files)).encode(), digest_size=6).hexdigest()
    target = stage_path / f"{source.name}-{key}"
    for other in stage_path.glob(f"{glob.escape(source.name)}-*"):
        if other != target and is_private(other, follow=False) and kind_of(other) == _KIND:
            with contextlib.suppress(FileNotFoundError):  # another rank was first
                _leave(OwnedFolder(other), os.open(other, os.O_RDONLY))
    need = 0 if (target / _WHOLE).exists() else sum(size for _, size, _ in files)
    free = free_disk_bytes(stage_path)
    if free is not None and need > free * (1 - _SPARE_SHARE):
        raise MachineError(
            f"staging needs {in_words(need)}; {stage_path} has {in_words(free)} free",
            "Stage to a larger file system, or train from the original folder.",
        )
    lock = _copy_all(source, target, files)
    return StagedFolder(target / _FILES, target, f"{reason}; {count('file', len(files))} copied", [lock])


@dataclass(frozen=True)
class StagedFolder:
    """Where to read the data: the copy, or the original (``reason`` says why)."""

    path: Path
    folder: Path | None
    reason: str
    _lock: list[int] = field(default_factory=list, repr=False, compare=False)  # a descriptor, until it is cleaned

    @property
    def staged(self) -> bool:
        """Whether ``path`` is a copy."""
        return self.folder is not None

    def clean(self) -> None:
        """Delete the copy, never the original. Of several jobs or ranks that read it, the last one deletes it."""
        if self.folder is not None and self._lock:
            _leave(OwnedFolder(self.folder), self._lock.pop())

    def __enter__(self) -> StagedFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.clean()


# --------------------------------------------------------------------------- copying

_File = tuple[str, int, int]  # path relative to the folder, size, time of the last change (ctime) in ns


def _copy_all(source: Path, target: Path, files: list[_File]) -> int:
    """Make the copy unless it is whole. Returns a descriptor with a shared lock on it, held while it is read."""
    # Everybody may write to /dev/shm: the folder must be private.
    owned = OwnedFolder.claim_private(target, _KIND, flag="stage")

    def copy(file: _File) -> None:
        name, size, _ = file
        final = target / _FILES / name
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, final)
        if final.stat().st_size != size:
            raise DataError(f"{source / name} did not arrive whole in {target}", "It may be changing meanwhile.")

    folders = {parent for name, _, _ in files for parent in Path(name).parents} - {Path()}
    lock = os.open(target, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with owned.locked("", wait=True), ThreadPoolExecutor(_COPIERS) as copiers:
            if not owned.owns(_WHOLE):
                if not owned.remove(_FILES):  # of a copy that was interrupted
                    raise ForeignFiles(f"{target / _FILES} has files that are not Fulltilt's", "Remove it.")
                owned.announce(_FILES, *(f"{_FILES}/{name}" for name in (*folders, *(name for name, _, _ in files))))
                (target / _FILES).mkdir()
                for _ in progress(copiers.map(copy, files), len(files), f"Staging {source.name}"):
                    pass
                owned.write(_WHOLE, b"")
    except BaseException as error:
        _leave(owned, lock)
        if not isinstance(error, OSError):
            raise
        raise MachineError(
            f"staging to {target} failed: {error.strerror or error}",
            "Free some space, or train from the original folder.",
        ) from error
    return lock


def _leave(copy: OwnedFolder, lock: int) -> None:
    """Give up the lock on a copy; the last job deletes it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        copy.remove(_WHOLE)  # first: a kill may leave the rest
        copy.remove_all()
    os.close(lock)


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
