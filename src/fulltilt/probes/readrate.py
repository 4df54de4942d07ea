"""How fast a sample of files reads, with the page cache cold and warm. Only reads; needs no root."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fulltilt.probes.census import FoundFile

_BLOCK_BYTES = 1024**2

# Of one large file at most this much is read, so that one file does not stand for the set.
_FILE_BYTES = 32 * 1024**2

# Where the kernel does not tell whether pages were still cached, a "cold" read this close to a warm one may be warm.
_TOO_WARM = 0.3


@dataclass(frozen=True, slots=True)
class ReadRates:
    """Rates over one sample of files; None where they could not be measured (or could not be made cold)."""

    cold_bytes_per_s: float | None = None
    cold_files_per_s: float | None = None
    warm_bytes_per_s: float | None = None
    warm_files_per_s: float | None = None
    mean_bytes: float | None = None


@dataclass(slots=True)
class _Tally:
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, size_bytes: int, seconds: float) -> None:
        self.files, self.bytes, self.seconds = self.files + 1, self.bytes + size_bytes, self.seconds + seconds

    def per_s(self, amount: int) -> float | None:
        return amount / self.seconds if self.files and self.seconds > 0 else None


def read_rates(files: Sequence[FoundFile], deadline_s: float, budget_bytes: int, can_be_cold: bool = True) -> ReadRates:
    """Read the files once cold and once warm until the deadline (``time.perf_counter()``) or the budget.

    Cold means that the file's data was not in memory; its name and its place on the disk may have been.
    """
    start_s = time.perf_counter()
    cold_until_s = start_s + 0.7 * (deadline_s - start_s)
    first, cold, warm = _Tally(), _Tally(), _Tally()
    proven = True
    done = []
    buffer = bytearray(_BLOCK_BYTES)  # one for all reads, or we would measure the allocator
    for file in files:
        if time.perf_counter() >= cold_until_s or first.bytes >= budget_bytes // 2:
            break
        was_cold = _make_cold(file) if can_be_cold else False
        result = _timed_read(file, buffer, cold_until_s)
        if result is None:
            continue
        done.append(file)
        first.add(*result)
        if was_cold is not False:
            cold.add(*result)
            proven = proven and was_cold is True
    for file in done:
        if time.perf_counter() >= deadline_s or warm.bytes >= budget_bytes // 2:
            break
        result = _timed_read(file, buffer, deadline_s)
        if result is not None:
            warm.add(*result)
    cold_rate, warm_rate = cold.per_s(cold.bytes), warm.per_s(warm.bytes)
    if not proven and cold_rate and warm_rate and cold_rate > _TOO_WARM * warm_rate:
        cold = _Tally()
    return ReadRates(
        cold_bytes_per_s=cold.per_s(cold.bytes),
        cold_files_per_s=cold.per_s(cold.files),
        warm_bytes_per_s=warm_rate,
        warm_files_per_s=warm.per_s(warm.files),
        mean_bytes=first.bytes / first.files if first.files else None,
    )


def _timed_read(file: FoundFile, buffer: bytearray, deadline_s: float) -> tuple[int, float] | None:
    """Bytes read and seconds taken to open the file, read it up to the limit, and close it."""
    start_s = time.perf_counter()
    total = 0
    try:
        with Path(file.path).open("rb", buffering=0) as stream:
            while total < _FILE_BYTES and (count := stream.readinto(buffer)):
                total += count
                if time.perf_counter() >= deadline_s:
                    break
    except OSError:
        return None  # it vanished, or we may not read it
    return total, time.perf_counter() - start_s


def _make_cold(file: FoundFile) -> bool | None:
    """Ask the kernel to drop the file from the page cache. True: it did; False: it did not; None: it does not say."""
    if not hasattr(os, "posix_fadvise"):
        return False
    try:
        with Path(file.path).open("rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, _FILE_BYTES, os.POSIX_FADV_DONTNEED)
            may_know = os.geteuid() in (0, os.fstat(stream.fileno()).st_uid) or os.access(file.path, os.W_OK)
            length = min(file.size_bytes, _FILE_BYTES)
            pages = _cached_pages(stream.fileno(), length) if may_know and length else None
    except OSError:
        return None
    return None if pages is None else pages == 0


def _cached_pages(descriptor: int, length: int) -> int | None:
    """Pages of the file's start that are in memory (mincore). The kernel lies to users who do not own the file."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        )
        address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            return None
        try:
            pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
            failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), pages)
            return None if failed else sum(page & 1 for page in pages)
        finally:
            libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))
    except (OSError, AttributeError):
        return None  # no such function in this C library
