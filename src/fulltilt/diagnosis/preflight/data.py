"""The preflight of a data folder: does it read fast enough, and would it pay to keep it in RAM?"""

from __future__ import annotations

import shlex

from fulltilt.diagnosis.preflight.limits import PreflightLimits
from fulltilt.figures import number, size
from fulltilt.records import CheckLine, Machine, StorageReading

_PLACES = {
    "tmpfs": "in RAM",
    "hdd": "on a hard disk",
    "ssd": "on an SSD",
    "nvme": "on NVMe",
    "network": "on a network file system",
    "overlay": "on a container's overlay",
}


def check_storage(storage: StorageReading, limits: PreflightLimits) -> CheckLine:
    """Does the data lie on something that reads fast enough?"""
    if storage.files == 0:
        return CheckLine("data", "warn", f"there is no file in {storage.path}", "Check the folder given with --data.")
    cold = _rates(storage.sequential_cold_bytes_per_s, storage.small_cold_files_per_s)
    warm = _rates(storage.sequential_warm_bytes_per_s, storage.small_warm_files_per_s)
    measured = f"{cold} uncached" if cold else f"{warm} cached" if warm else None
    figure = ", ".join(part for part in (_PLACES.get(storage.kind), measured) if part)
    if storage.kind == "tmpfs":
        return CheckLine("data", "ok", figure)
    slow = is_slow(storage, limits)
    if slow is None:
        unknown = "what it reads uncached could not be measured"
        return CheckLine("data", "skip", f"{figure}; {unknown}" if figure else unknown)
    if not slow:
        return CheckLine("data", "ok", figure)
    remedy = "Move it to a local SSD, pack small files into large ones, or keep it in RAM (next line)."
    return CheckLine("data", "warn", figure, remedy)


def _rates(bytes_per_s: float | None, files_per_s: float | None) -> str:
    parts = []
    if bytes_per_s is not None:
        parts.append(f"{size(bytes_per_s)}/s")
    if files_per_s is not None:
        parts.append(f"{number(files_per_s)} files/s")
    return " and ".join(parts)


def is_slow(storage: StorageReading, limits: PreflightLimits) -> bool | None:
    """By what was measured uncached; without that, by the kind of disk; None where neither is known."""
    sequential, small = storage.sequential_cold_bytes_per_s, storage.small_cold_files_per_s
    if sequential is None and small is None:
        return True if storage.kind in ("hdd", "network") else None
    return (sequential is not None and sequential < limits.sequential_bytes_per_s) or (
        small is not None and small < limits.small_files_per_s
    )


def check_staging(storage: StorageReading, machine: Machine, limits: PreflightLimits) -> CheckLine:
    """Would a RAM disk help, and does the set fit?"""
    if storage.kind == "tmpfs":
        return CheckLine("RAM disk", "ok", "the data is on one")
    if storage.total_bytes is None or storage.fits_in_ram is None:
        return CheckLine("RAM disk", "skip", "the size of the set is not known")
    held = f"{'' if storage.counted_fully else 'at least '}{size(storage.total_bytes)}"
    slow = is_slow(storage, limits)
    if not storage.fits_in_ram:
        figure = f"the set ({held}) does not fit in RAM, so every epoch reads the disk"
        if not slow:
            return CheckLine("RAM disk", "ok", figure)
        return CheckLine("RAM disk", "warn", figure, "Store the set smaller (resized, uint8) or on a faster disk.")
    gain = _staging_gain(storage)
    if not slow or (gain is not None and gain < limits.staging_gain):
        return CheckLine("RAM disk", "ok", f"not needed: the set ({held}) stays cached after one epoch")
    faster = "" if gain is None else f": RAM reads {number(gain)} × as fast"
    copy = "Mount a tmpfs of that size and copy the set there."
    if machine.shm_free_bytes is not None and machine.shm_free_bytes > storage.total_bytes:
        copy = f"cp -r {shlex.quote(storage.path)} /dev/shm/"
    return CheckLine("RAM disk", "warn", f"would help{faster}, and the set ({held}) fits", copy)


def _staging_gain(storage: StorageReading) -> float | None:
    """How many times as fast the set reads from RAM: the larger of large and small files."""
    pairs = (
        (storage.sequential_warm_bytes_per_s, storage.sequential_cold_bytes_per_s),
        (storage.small_warm_files_per_s, storage.small_cold_files_per_s),
    )
    return max((warm / cold for warm, cold in pairs if warm is not None and cold), default=None)
