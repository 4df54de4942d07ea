"""A data folder: what it lies on, and how fast its own files read, cold and warm."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Literal

import psutil

from fulltilt.errors import MachineError, UsageError
from fulltilt.probes.census import Census, count_files
from fulltilt.probes.host import memory_headroom_bytes
from fulltilt.probes.mounts import Mount, mount_of, read_mounts
from fulltilt.probes.readrate import read_rates
from fulltilt.records import StorageReading

Kind = Literal["ssd", "hdd", "nvme", "tmpfs", "network", "overlay", "unknown"]

_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_OVERLAY = {"overlay", "overlayfs", "aufs", "fuse.fuse-overlayfs"}
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "wekafs"),
    *("panfs", "orangefs", "9p", "virtiofs", "vboxsf", "vmhgfs", "drvfs", "prl_fs", "davfs", "fuse"),
}

# ZFS keeps a cache of its own that posix_fadvise does not reach, so that a cold read cannot be made.
_OWN_CACHE = {"zfs"}

# Virtual disks say "rotational" whatever is behind them.
_VIRTUAL_NAMES = ("vd", "xvd")
_VIRTUAL_MAKERS = ("Msft", "QEMU", "VMware", "Google", "VBOX", "Virtual")


def read_storage(
    folder: str | Path, budget_s: float = 3.0, budget_bytes: int = 256 * 1024**2, root: Path = Path("/")
) -> StorageReading:
    """Measure ``folder`` within the budgets, reading only. Raises UsageError if it is not a folder."""
    path = _checked(folder)
    start_s = time.perf_counter()
    end_s = start_s + budget_s
    filesystem, device, kind = _place(path, root)
    census = count_files(path, start_s + 0.3 * budget_s)
    can_be_cold = kind != "tmpfs" and filesystem not in _OWN_CACHE
    halfway_s = (time.perf_counter() + end_s) / 2
    large = read_rates(census.large, halfway_s, budget_bytes * 3 // 4, can_be_cold)
    small = read_rates(census.small, end_s, budget_bytes // 4, can_be_cold)
    return StorageReading(
        path=str(folder),
        filesystem=filesystem,
        device=device,
        kind=kind,
        files=census.files,
        total_bytes=census.total_bytes,
        counted_fully=census.fully,
        sequential_cold_bytes_per_s=large.cold_bytes_per_s,
        sequential_warm_bytes_per_s=large.warm_bytes_per_s,
        small_cold_files_per_s=small.cold_files_per_s,
        small_warm_files_per_s=small.warm_files_per_s,
        small_file_bytes=small.mean_bytes,
        free_bytes=_free_bytes(path),
        fits_in_ram=True if kind == "tmpfs" else _fits(census, memory_headroom_bytes(root)),
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


def _fits(census: Census, room_bytes: int) -> bool | None:
    if census.total_bytes > room_bytes:
        return False
    return True if census.fully else None


def _free_bytes(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _place(path: Path, root: Path) -> tuple[str | None, str | None, Kind]:
    """File system, device and kind of what ``path`` lies on."""
    mounts = read_mounts(root)
    mount = mount_of(path, mounts)
    if mount is not None:
        return mount.filesystem, mount.source, storage_kind(mount, root)
    for part in sorted(psutil.disk_partitions(all=True), key=lambda part: -len(part.mountpoint)):  # Windows, macOS
        if path.is_relative_to(part.mountpoint):
            return part.fstype or None, part.device or None, "network" if "remote" in part.opts else "unknown"
    return None, None, "unknown"


def storage_kind(mount: Mount, root: Path = Path("/")) -> Kind:
    """What is behind a mount, as far as the kernel tells."""
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
    if under:  # RAID and encrypted volumes: as slow as the slowest below
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
