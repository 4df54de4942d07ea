"""``stage_dir``: a data folder copied to tmpfs or a local disk when that pays, checked, resumable and cleaned up.

    <stage>/<name>-<key>/files/…       the copy
    <stage>/<name>-<key>/staged.jsonl  one line for each file that is whole: path, size, time, checksum
    <stage>/<name>-<key>/.fulltilt     the marker: what Fulltilt has put there, and may delete

A file is written beside its place and renamed, and its line is appended after that: whatever ends the copying, the
next run goes on with the files that have no line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fulltilt.errors import DataError, MachineError, UsageError
from fulltilt.feed.disk_cache import free_disk_bytes
from fulltilt.feed.progress import progress
from fulltilt.feed.tiers import in_words
from fulltilt.probes.storage import read_storage
from fulltilt.records import StorageReading
from fulltilt.store.owned_folder import OwnedFolder

_LINES, _FILES = "staged.jsonl", "files"
# Left free on the stage, for everybody else: a full /dev/shm breaks DataLoader workers, a full tmpfs takes the RAM.
_SPARE_SHARE = 0.1
_COPIERS = 8
_PIECE = 4 * 1024**2


@dataclass(frozen=True)
class Verdict:
    """Whether staging pays, and in words why."""

    pays: bool
    reason: str


def staging_pays(source: StorageReading, epochs: int, free_bytes: int | None) -> Verdict:
    """Decide from what was measured of the source. A pure function; None means not measured and says so."""
    if source.kind == "tmpfs":
        return Verdict(False, "the data lies in memory already")
    if source.total_bytes is None or not source.counted_fully:
        return Verdict(False, "the folder is too large to count in the time allowed")
    if free_bytes is not None and source.total_bytes > free_bytes * (1 - _SPARE_SHARE):
        return Verdict(False, f"{in_words(source.total_bytes)} do not fit into {in_words(free_bytes)} free")
    if epochs < 2:
        return Verdict(False, "every file is read once: copying it first would read it once more")
    if source.kind in ("network", "hdd"):
        return Verdict(True, f"the data lies on {source.kind} and is read {epochs} times")
    if source.fits_in_ram:
        return Verdict(False, f"the page cache keeps {in_words(source.total_bytes)} after the first epoch by itself")
    cold, warm = source.small_cold_files_per_s, source.small_warm_files_per_s
    if cold is None or warm is None:
        return Verdict(False, "the storage could not be measured cold; when='always' copies all the same")
    if warm > 2 * cold:
        return Verdict(True, f"{warm:.0f} files/s from memory against {cold:.0f} from the disk")
    return Verdict(False, f"the disk gives {cold:.0f} files/s, memory {warm:.0f}: too little to gain")


def stage_dir(
    data: str | Path,
    stage: str | Path = "/dev/shm",
    *,
    when: str = "auto",
    epochs: int = 10,
    shown: bool | None = None,
) -> StagedFolder:
    """Copy ``data`` below ``stage`` if it pays (``when``: auto, always, never); use ``.path`` in either case.

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
        raise UsageError(f"the stage {stage_path} lies within the data folder {source}", "Choose one outside of it.")
    free = free_disk_bytes(stage_path)
    if when == "auto":
        verdict = staging_pays(read_storage(source), epochs, free)
        if not verdict.pays:
            return StagedFolder(source, None, verdict.reason)
        reason = verdict.reason
    else:
        reason = "asked for"
    files = _files_of(source)
    target = stage_path / f"{source.name}-{_key(source)}"
    _check_space(sum(size for _, size, _ in files), target, free)
    copied = _copy_all(source, target, files, shown)
    return StagedFolder(target / _FILES, target, f"{reason}; {copied} of {len(files)} files copied")


@dataclass(frozen=True)
class StagedFolder:
    """Where to read the data: the copy, or the original where copying does not pay (``reason`` says why)."""

    path: Path
    folder: Path | None
    reason: str

    @property
    def staged(self) -> bool:
        """Whether ``path`` is a copy."""
        return self.folder is not None

    def clean(self) -> None:
        """Delete the copy; the original is never touched."""
        if self.folder is not None:
            OwnedFolder(self.folder).remove_all()

    def __enter__(self) -> StagedFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.clean()


# --------------------------------------------------------------------------- copying

_File = tuple[str, int, int]  # path relative to the folder, size, modification time in ns


def _files_of(folder: Path) -> list[_File]:
    found = []
    for name in files_below(str(folder)):
        path = Path(name)
        with contextlib.suppress(OSError):  # a dangling link is not data
            status = path.stat()
            found.append((str(path.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return found


def _copy_all(source: Path, target: Path, files: list[_File], shown: bool | None) -> int:
    # In /dev/shm everybody may write: the folder has to be this user's alone.
    owned = OwnedFolder.claim_private(target, "staged copy", flag="stage")
    done = dict(_whole_files(target))
    missing = [file for file in files if done.get(file[0]) != (file[1], file[2])]
    places: queue.SimpleQueue[Path] = queue.SimpleQueue()
    names = [target / f"copying-{os.getpid()}-{number}" for number in range(_COPIERS)]
    for name in names:
        places.put(name)
    copied = {parent for file in files for parent in (Path(file[0]), *Path(file[0]).parents)}
    try:
        owned.reserve(_LINES, _FILES, *names, *(f"{_FILES}/{path}" for path in copied if path != Path()))
        (target / _FILES).mkdir(exist_ok=True)
        with (target / _LINES).open("a", encoding="utf-8") as lines, ThreadPoolExecutor(_COPIERS) as copiers:
            copies = copiers.map(lambda file: _copy_one(source, target / _FILES, file, places), missing)
            for line in progress(copies, len(missing), f"Staging {source.name}", shown=shown):
                lines.write(json.dumps(line) + "\n")
                lines.flush()
    except OSError as error:
        raise MachineError(
            f"staging to {target} failed: {error.strerror or error}",
            "What was copied is kept and taken up again; free some space, or train from the original folder.",
        ) from error
    return len(missing)


def _copy_one(source: Path, target: Path, file: _File, places: queue.SimpleQueue[Path]) -> dict[str, str | int]:
    """Copy one file with a checksum taken while reading, and compare what arrived with it."""
    making = places.get()
    try:
        return _copy_to(source, target, file, making)
    finally:
        making.unlink(missing_ok=True)
        places.put(making)


def _copy_to(source: Path, target: Path, file: _File, making: Path) -> dict[str, str | int]:
    name, size, time_ns = file
    final = target / name
    final.parent.mkdir(parents=True, exist_ok=True)
    checksum = 0
    with (source / name).open("rb") as reading, making.open("wb") as writing:
        while piece := reading.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
            writing.write(piece)
    if making.stat().st_size != size or _checksum(making) != checksum:
        raise DataError(f"{source / name} did not arrive whole in {target}", "It may be changing while it is copied.")
    os.utime(making, ns=(time_ns, time_ns))
    making.replace(final)
    return {"path": name, "size": size, "time_ns": time_ns, "crc32": checksum}


def _whole_files(target: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Files that an earlier run copied and that are still as it left them. A torn last line is dropped."""
    try:
        lines = (target / _LINES).read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        return
    for line in lines:
        try:
            entry = json.loads(line)
            path = target / _FILES / entry["path"]
            whole = line.endswith("\n") and path.stat().st_size == entry["size"]
            if whole and _checksum(path) == entry["crc32"]:
                yield entry["path"], (entry["size"], entry["time_ns"])
        except (ValueError, KeyError, TypeError, OSError):
            continue


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _check_space(need: int, target: Path, free: int | None) -> None:
    there = sum(size for _, (size, _) in _whole_files(target))
    if free is not None and need - there > free * (1 - _SPARE_SHARE):
        raise MachineError(
            f"staging needs {in_words(need - there)}; {target.parent} has {in_words(free)} free",
            "Stage to a larger file system, or train from the original folder.",
        )


def _key(source: Path) -> str:
    return hashlib.blake2b(str(source.resolve()).encode(), digest_size=6).hexdigest()


def files_below(folder: str, _above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """The paths of all files in ``folder`` and below, in the order of their names; a circle of links is left."""
    folders: list[str] = []
    files: list[str] = []
    with contextlib.suppress(OSError):  # not ours to read
        status = os.stat(folder)  # noqa: PTH116 - a million files: Path would cost seconds
        here = status.st_dev, status.st_ino
        if here in _above:
            return
        _above |= {here}
        with os.scandir(folder) as entries:
            for entry in entries:
                (folders if entry.is_dir() else files).append(entry.path)
    yield from sorted(files)
    for inner in sorted(folders):
        yield from files_below(inner, _above)
