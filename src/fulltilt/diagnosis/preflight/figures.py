"""Figures as the preflight prints them."""

from __future__ import annotations


def memory(count: float) -> str:
    """Bytes in binary units, as memory is sold and `docker --shm-size` counts: ``64 MiB``, ``23.7 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if count == int(count) or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def used_of(used: int, total: int) -> str:
    """``12.3 of 24.0 GiB``."""
    return f"{used / 1024**3:.1f} of {total / 1024**3:.1f} GiB"


def plural(count: int, word: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
