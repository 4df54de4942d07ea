"""The folder of disk caches: what lies in it, what is in use, what has to give way."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: caches there are not protected from a clearing command while a job uses them
    fcntl = None  # type: ignore[assignment]

from fulltilt.errors import UsageError

HEADER, ROWS, MARKS = "cache.json", "rows.bin", "marks.bin"
PARTIAL, MAKING, ONE_RUN = ".partial", ".new", "run-"
# A folder is made in milliseconds; one that is older than this was left by a kill.
_MAKING_S = 3600.0


class CacheFull(Exception):  # noqa: N818 - an event; the job goes on without the cache
    """There is no room left for the cache; the message says where and how much was needed."""


@dataclass(frozen=True)
class CacheEntry:
    """One cache on disk, as ``fulltilt cache list`` shows it."""

    folder: Path
    label: str
    samples: int
    size_bytes: int
    complete: bool
    used_at_s: float
    parts: dict[str, str]
    in_use: bool


def default_cache_dir() -> Path:
    """FULLTILT_CACHE_DIR, or fulltilt/feed in the user's cache folder."""
    named = os.environ.get("FULLTILT_CACHE_DIR")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.home may raise
    if home.startswith("~"):  # a user without a home, as containers run them
        home = tempfile.gettempdir()
    return Path(home) / "fulltilt" / "feed"


def list_caches(cache_dir: Path) -> list[CacheEntry]:
    """Every cache in ``cache_dir``, the most recently used first."""
    entries = [entry for folder in _folders(cache_dir) if (entry := _read_entry(folder)) is not None]
    return sorted(entries, key=lambda entry: -entry.used_at_s)


def remove(entry: CacheEntry) -> bool:
    """Delete a cache; False if a running job uses it, or if it may not be deleted."""
    with _lock_alone(entry.folder) as alone:
        if alone:
            shutil.rmtree(entry.folder, ignore_errors=True)
    return alone and not entry.folder.exists()


def sweep(cache_dir: Path) -> None:
    """Delete what killed runs left and nobody can use: half-made folders, and caches that were for one run only."""
    with contextlib.suppress(OSError):
        for folder in [*cache_dir.glob(f"*{MAKING}"), *cache_dir.glob(f"{ONE_RUN}*{PARTIAL}")]:
            making = folder.name.endswith(MAKING)
            if making and time.time() - folder.stat().st_mtime < _MAKING_S:
                continue
            with contextlib.nullcontext(True) if making else _lock_alone(folder) as alone:
                if alone:
                    shutil.rmtree(folder, ignore_errors=True)


def default_limit_bytes(cache_dir: Path) -> int | None:
    """The cap on all caches together: FULLTILT_CACHE_LIMIT_BYTES, or half of what the disk has left for them."""
    named = os.environ.get("FULLTILT_CACHE_LIMIT_BYTES")
    if named:
        try:
            return int(named)
        except ValueError as error:
            raise UsageError(f"FULLTILT_CACHE_LIMIT_BYTES is {named!r}, not a number of bytes") from error
    free = free_disk_bytes(cache_dir)
    return None if free is None else (free + sum(entry.size_bytes for entry in list_caches(cache_dir))) // 2


def make_room(cache_dir: Path, need_bytes: int, limit_bytes: int | None) -> None:
    """Delete the caches used longest ago until ``need_bytes`` fit below the cap and on the disk. Raises CacheFull."""
    entries = list_caches(cache_dir)
    used = sum(entry.size_bytes for entry in entries)
    free = free_disk_bytes(cache_dir)
    limits = [limit_bytes] if limit_bytes is not None else []
    limits += [used + free] if free is not None else []
    if not limits:
        return
    limit = min(limits)
    if need_bytes > limit:
        raise CacheFull(f"the cache needs {need_bytes} bytes and may take {limit}")
    for entry in reversed(entries):
        if used + need_bytes <= limit:
            return
        if remove(entry):
            used -= entry.size_bytes
    if used + need_bytes > limit:
        raise CacheFull(f"the caches in use leave no {need_bytes} bytes of the {limit} allowed")


def free_disk_bytes(folder: Path) -> int | None:
    """Free bytes of the file system that ``folder`` lies or would lie on; None if it cannot be asked."""
    for existing in (folder, *folder.parents):
        try:
            return shutil.disk_usage(existing).free
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
    return None


# --------------------------------------------------------------------------- folders


def _folders(cache_dir: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(cache_dir) if not entry.name.endswith(MAKING)]
    except OSError:  # not there, no folder, or not ours to read
        return []


def read_header(folder: Path) -> dict[str, Any] | None:
    """What ``cache.json`` says; None if it cannot be read."""
    try:
        header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return header if isinstance(header, dict) else None


def _read_entry(folder: Path) -> CacheEntry | None:
    header = read_header(folder)
    if header is None:
        return None
    label, samples, parts = header.get("label", "?"), header.get("samples", 0), header.get("parts", {})
    if not isinstance(samples, int) or not isinstance(parts, dict):
        return None
    try:
        # Blocks, not length: a half-written file is sparse.
        size = sum((folder / name).stat().st_blocks * 512 for name in (ROWS, MARKS))
        used = (folder / HEADER).stat().st_mtime
    except OSError:
        return None
    with _lock_alone(folder) as alone:
        in_use = not alone
    return CacheEntry(
        folder,
        str(label),
        samples,
        size,
        not folder.name.endswith(PARTIAL),
        used,
        parts,
        in_use,
    )


def lock_shared(folder: Path) -> int | None:
    """A descriptor that marks the cache as in use until it is closed (the kernel does so at a kill too)."""
    try:
        fd = os.open(folder / HEADER, os.O_RDONLY)
    except OSError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


@contextlib.contextmanager
def _lock_alone(folder: Path) -> Iterator[bool]:
    try:
        fd = os.open(folder / HEADER, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)
