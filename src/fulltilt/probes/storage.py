"""A data folder: its file system, a sample of its files, and how fast they read."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fulltilt.errors import MachineError, UsageError
from fulltilt.probes.cgroup import Mount, mount_of, read_mounts
from fulltilt.probes.host import memory_headroom_bytes
from fulltilt.records import StorageReading

# --------------------------------------------------------------------------- file sample

# Smaller files are read at once, and opening one costs as much as reading it.
SMALL_FILE_BYTES = 1024**2

_SAMPLE_FILES = 1000


@dataclass(slots=True)
class FileSample:
    """Counts, and uniform random samples of the paths of small and of large files."""

    files: int = 0
    total_bytes: int = 0
    fully: bool = True
    small: list[str] = field(default_factory=list)
    large: list[str] = field(default_factory=list)


def count_files(folder: Path, deadline_s: float) -> FileSample:
    """Count until ``time.perf_counter()`` reaches the deadline. Links to files and folders are followed once."""
    found = FileSample()
    draw = random.Random(0)  # the same folder gives the same sample
    seen = {"small": 0, "large": 0}
    for entry in _files(folder, found):
        try:
            size = entry.stat().st_size
        except OSError:
            continue
        found.files += 1
        found.total_bytes += size
        group = "small" if size < SMALL_FILE_BYTES else "large"
        seen[group] += 1
        sample: list[str] = getattr(found, group)
        if len(sample) < _SAMPLE_FILES:
            sample.append(entry.path)
        elif (slot := draw.randrange(seen[group])) < _SAMPLE_FILES:
            sample[slot] = entry.path
        if time.perf_counter() >= deadline_s:
            found.fully = False
            break
    # Training does not read files in the order of their folders, in which they may be stored.
    draw.shuffle(found.small)
    draw.shuffle(found.large)
    return found


def _files(folder: Path, found: FileSample) -> Iterator[os.DirEntry[str]]:
    todo, visited = [str(folder)], set()
    while todo:
        path = todo.pop()
        try:
            status = os.stat(path)  # noqa: PTH116 - plain strings keep a million entries cheap
            if (status.st_dev, status.st_ino) in visited:
                continue  # a link back to a folder that was counted
            visited.add((status.st_dev, status.st_ino))
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir():
                        todo.append(entry.path)
                    elif entry.is_file():
                        yield entry
        except OSError:
            found.fully = False  # a folder that we may not read


# --------------------------------------------------------------------------- read rates

_BLOCK_BYTES = 1024**2

# At most this much of a file is read, so that a single one does not dominate.
_FILE_BYTES = 32 * 1024**2

# If it is unknown whether pages were cached, a "cold" read at more than this part of the warm rate may be warm.
_TOO_WARM = 0.3


@dataclass(slots=True)
class Tally:
    """How much was read, and how long it took."""

    files: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, size_bytes: int, seconds: float) -> None:
        """Count one more file."""
        self.files, self.bytes, self.seconds = self.files + 1, self.bytes + size_bytes, self.seconds + seconds

    @property
    def bytes_per_s(self) -> float | None:
        """The rate in bytes; None where nothing was read."""
        return self.bytes / self.seconds if self.seconds else None

    @property
    def files_per_s(self) -> float | None:
        """The rate in files; None where nothing was read."""
        return self.files / self.seconds if self.seconds else None


def read_twice(files: Sequence[str], deadline_s: float, budget_bytes: int, can_be_cold: bool) -> tuple[Tally, Tally]:
    """Read the files once cold and once warm until the deadline (``time.perf_counter()``) or the budget.

    Cold means that the file's data was not in memory (its metadata may have been). The first of the two is empty where
    cold reads were not possible.
    """
    start_s = time.perf_counter()
    cold_until_s = start_s + 0.7 * (deadline_s - start_s)
    cold, warm = Tally(), Tally()
    proven, read_bytes = True, 0
    done = []
    buffer = bytearray(_BLOCK_BYTES)  # one for all reads, so that allocations are not measured
    for file in files:
        if time.perf_counter() >= cold_until_s or read_bytes >= budget_bytes // 2:
            break
        if can_be_cold:
            _drop_from_cache(file)
        result = _timed_read(file, buffer, cold_until_s)
        if result is None:
            continue
        done.append(file)
        size_bytes, seconds, was_cold = result
        read_bytes += size_bytes
        if can_be_cold and was_cold is not False:
            cold.add(size_bytes, seconds)
            proven = proven and was_cold is True
    for file in done:
        if time.perf_counter() >= deadline_s or warm.bytes >= budget_bytes // 2:
            break
        result = _timed_read(file, buffer, deadline_s)
        if result is not None:
            warm.add(*result[:2])
    too_warm = not proven and (cold.bytes_per_s or 0.0) > _TOO_WARM * (warm.bytes_per_s or 0.0) > 0
    return Tally() if too_warm else cold, warm


def _timed_read(file: str, buffer: bytearray, deadline_s: float) -> tuple[int, float, bool | None] | None:
    """Bytes read, seconds to open, read (up to the limit) and close the file, and whether it was cold."""
    start_s = time.perf_counter()
    total = 0
    try:
        with Path(file).open("rb", buffering=0) as stream:
            was_cold = _is_cold(stream.fileno())
            while total < _FILE_BYTES and (count := stream.readinto(buffer)):
                total += count
                if time.perf_counter() >= deadline_s:
                    break
    except OSError:
        return None  # it is gone, or not readable
    return total, time.perf_counter() - start_s, was_cold


def _is_cold(descriptor: int) -> bool | None:
    """Whether the start of the file is not in memory; None where unknown. The kernel then begins to read it."""
    try:
        return os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT) == 0  # nothing to read: an empty file
    except BlockingIOError:
        return True
    except (OSError, AttributeError):
        return None


def _drop_from_cache(file: str) -> None:
    """Ask the kernel to drop the file from the page cache."""
    try:
        with Path(file).open("rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, _FILE_BYTES, os.POSIX_FADV_DONTNEED)
    except OSError:
        pass  # not supported here; the read then shows that it was not cold


# --------------------------------------------------------------------------- storage

Kind = Literal["ssd", "hdd", "nvme", "tmpfs", "network", "overlay", "unknown"]

_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_OVERLAY = {"overlay", "overlayfs", "aufs", "fuse.fuse-overlayfs"}
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "wekafs"),
    *("panfs", "orangefs", "9p", "virtiofs", "vboxsf", "vmhgfs", "drvfs", "prl_fs", "davfs", "fuse"),
}

# ZFS has a cache of its own that posix_fadvise does not drop, so that cold reads are not possible.
_OWN_CACHE = {"zfs"}

# Virtual disks report "rotational" whatever they are.
_VIRTUAL_NAMES = ("vd", "xvd")
_VIRTUAL_MAKERS = ("Msft", "QEMU", "VMware", "Google", "VBOX", "Virtual")


def read_storage(folder: str | Path, budget_s: float = 3.0, budget_bytes: int = 256 * 1024**2) -> StorageReading:
    """Measure ``folder`` within the budgets, reading only. Raises UsageError if it is not a folder."""
    path = _checked(folder)
    start_s = time.perf_counter()
    end_s = start_s + budget_s
    place = place_of(str(path))
    in_memory = place.kind == "tmpfs"
    found = count_files(path, start_s + 0.3 * budget_s)
    can_be_cold = not in_memory and place.filesystem not in _OWN_CACHE
    halfway_s = (time.perf_counter() + end_s) / 2
    large_cold, large_warm = read_twice(found.large, halfway_s, budget_bytes * 3 // 4, can_be_cold)
    small_cold, small_warm = read_twice(found.small, end_s, budget_bytes // 4, can_be_cold)
    return replace(
        place,
        path=str(folder),
        files=found.files,
        total_bytes=found.total_bytes,
        counted_fully=found.fully,
        sequential_cold_bytes_per_s=large_cold.bytes_per_s,
        sequential_warm_bytes_per_s=large_warm.bytes_per_s,
        small_cold_files_per_s=small_cold.files_per_s,
        small_warm_files_per_s=small_warm.files_per_s,
        small_file_bytes=small_warm.bytes / small_warm.files if small_warm.files else None,
        free_bytes=shutil.disk_usage(path).free,
        fits_in_ram=True if in_memory else _fits(found, memory_headroom_bytes()),
    )


def _checked(folder: str | Path) -> Path:
    path = Path(folder).expanduser()
    try:
        if not path.exists():
            raise UsageError(f"the data folder {folder} does not exist")
        if not path.is_dir():
            raise UsageError(f"{folder} is a file; a folder with data is needed")
        with os.scandir(path):
            return path.resolve()
    except OSError as error:
        raise MachineError(f"cannot read the data folder {folder}: {error.strerror or error}") from error


def _fits(found: FileSample, room_bytes: int) -> bool | None:
    if found.total_bytes > room_bytes:
        return False
    return True if found.fully else None


def place_of(folder: str) -> StorageReading:
    """The storage of a folder, without reading any file."""
    mount = mount_of(Path(folder).resolve(), read_mounts())
    if mount is None:
        return StorageReading(folder)
    return StorageReading(folder, mount.filesystem, mount.source, storage_kind(mount))


def storage_kind(mount: Mount, root: Path = Path("/")) -> Kind:
    """The kind of storage of a mount, as far as the kernel knows it."""
    filesystem = mount.filesystem
    if filesystem in _MEMORY:
        return "tmpfs"
    if filesystem in _OVERLAY:
        return "overlay"
    if filesystem in _NETWORK or filesystem.startswith("fuse."):
        return "network"  # gcsfuse, s3fs, sshfs and their like
    number = mount.device_number
    if number.startswith("0:"):  # btrfs and zfs have no device number of their own
        try:
            real = os.stat(root / mount.source.lstrip("/")).st_rdev  # noqa: PTH116 - a device, not a file
            number = f"{os.major(real)}:{os.minor(real)}"
        except (OSError, AttributeError):
            return "unknown"
    return _block_kind((root / "sys/dev/block" / number).resolve())


def _block_kind(block: Path) -> Kind:
    if (block / "partition").exists():
        block = block.parent
    try:
        under = [link.resolve() for link in (block / "slaves").iterdir()]
    except OSError:
        under = []
    if under:  # RAID and encrypted volumes: as slow as the slowest disk
        kinds = {_block_kind(one) for one in under}
        order: tuple[Kind, ...] = ("hdd", "unknown", "ssd", "nvme")
        return next((kind for kind in order if kind in kinds), "unknown")
    if block.name.startswith("nvme"):
        return "nvme"
    rotational = _text(block / "queue/rotational")
    if rotational == "0":
        return "ssd"
    is_virtual = block.name.startswith(_VIRTUAL_NAMES) or _text(block / "device/vendor").startswith(_VIRTUAL_MAKERS)
    return "hdd" if rotational == "1" and not is_virtual else "unknown"


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
