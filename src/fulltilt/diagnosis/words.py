"""Figures as people read them."""

from __future__ import annotations


def percent(share: float) -> str:
    """``0.62`` as ``62 %``; small shares keep one digit."""
    value = 100 * share
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def number(value: float) -> str:
    """Three significant digits, thousands apart: ``3.14``, ``412``, ``12,300``."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def seconds(value: float) -> str:
    """``0.0123`` as ``12.3 ms``, ``95`` as ``95 s``, ``4000`` as ``1.1 h``."""
    for limit, unit, factor in ((1e-3, "µs", 1e6), (1.0, "ms", 1e3), (600.0, "s", 1.0), (7200.0, "min", 1 / 60)):
        if abs(value) < limit:
            return f"{number(value * factor)} {unit}"
    return f"{number(value / 3600)} h"


def size(count: float) -> str:
    """Bytes in decimal units: ``1_500_000`` as ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{number(count)} {unit}"
        count /= 1000
    return f"{number(count)} TB"


def times(factor: float) -> str:
    """``3.12`` as ``3.1 ×``."""
    return f"{factor:.1f} ×" if factor < 9.95 else f"{factor:.0f} ×"


def capital(text: str) -> str:
    """``text`` as the beginning of a sentence; the rest keeps its case."""
    return text[:1].upper() + text[1:]


def cpus(usable: float) -> str:
    """``1 CPU``, ``16 CPUs``, ``1.5 CPUs``."""
    return "1 CPU" if usable == 1 else f"{number(usable)} CPUs"


def count(word: str, how_many: int) -> str:
    """``1 worker``, ``7 workers``, ``3 passes``."""
    ending = "" if how_many == 1 else "es" if word.endswith(("s", "ch")) else "s"
    return f"{how_many} {word}{ending}"
