"""Figures and names as people read them: every sentence, table and page words them here.

None was not measured and reads ``–``. Figures have three significant digits: a measurement has no more to say.
"""

from __future__ import annotations

import re
import signal
import unicodedata
from collections.abc import Sequence

NOT_MEASURED = "–"
SIGNALS = {one.value: one.name for one in signal.Signals}
_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def percent(share: float | None) -> str:
    """A fraction of one: ``62 %``, ``6.1 %``, ``< 0.1 %``."""
    if share is None:
        return NOT_MEASURED
    value = 100 * share
    if 0 < abs(value) < 0.05:
        return "< 0.1 %"
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def pct(value: float | None) -> str:
    """A figure that is already in per cent, as the names that end in ``_pct``."""
    return percent(None if value is None else value / 100)


def pct_range(values: Sequence[float | None]) -> str:
    """Several figures in per cent, from the lowest to the highest: ``58 to 61 %``."""
    known = [value for value in values if value is not None]
    if not known:
        return NOT_MEASURED
    low, high = pct(min(known)), pct(max(known))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def number(value: float | None) -> str:
    """A figure or rate: ``3.14``, ``412``, ``12,345``, ``3.19 M``."""
    if value is None:
        return NOT_MEASURED
    for limit, unit, scale in ((999.5e6, " G", 1e9), (999_500, " M", 1e6)):
        if abs(value) >= limit:
            return f"{_three_digits(value / scale)}{unit}"
    return _three_digits(value)


def whole(value: int) -> str:
    """A whole number, exactly: ``1,234,567``."""
    return f"{value:,}"


def count(word: str, how_many: int) -> str:
    """``1 worker``, ``7 workers``, ``3 passes``."""
    ending = "" if how_many == 1 else "es" if word.endswith(("s", "ch")) else "s"
    return f"{whole(how_many)} {word}{ending}"


def listed(names: Sequence[str], most: int) -> str:
    """``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def loader_settings(
    num_workers: int | None,
    prefetch_factor: int | None,
    pin_memory: bool | None,
    persistent_workers: bool | None = None,
) -> str:
    """Settings of a DataLoader: ``8 workers, prefetch 4, pinned, persistent``. What is None is left out."""
    parts = (
        "" if num_workers is None else count("worker", num_workers) if num_workers else "no workers",
        f"prefetch {prefetch_factor}" if prefetch_factor and num_workers != 0 else "",
        "pinned" if pin_memory else "",
        "persistent" if persistent_workers else "",
    )
    return ", ".join(filter(None, parts))


def cpus(usable: float) -> str:
    """``1 CPU``, ``16 CPUs``, ``1.5 CPUs``."""
    return "1 CPU" if usable == 1 else f"{number(usable)} CPUs"


def seconds(value: float | None) -> str:
    """A duration: ``31 µs``, ``12.3 ms``, ``14.4 s``, ``1 min 35 s``, ``15 min``, ``3 h 12 min``."""
    if value is None:
        return NOT_MEASURED
    if value == 0:
        return "0 s"
    for limit, unit, scale in ((0.9995e-3, "µs", 1e6), (0.9995, "ms", 1e3), (59.95, "s", 1.0)):
        if abs(value) < limit:
            return f"{_three_digits(value * scale)} {unit}"
    minutes, left_s = divmod(round(abs(value)), 60)
    sign = "-" if value < 0 else ""
    if minutes < 60:
        return f"{sign}{minutes} min" + (f" {left_s:02d} s" if left_s else "")
    return f"{sign}{minutes // 60:,} h" + (f" {minutes % 60:02d} min" if minutes % 60 else "")


def duration_s(text: str) -> float | None:
    """Seconds of ``90``, ``90s``, ``30m``, ``11h`` or ``1h30m``; None when it is no duration."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smhd])?\s*", text.strip())
    whole = re.fullmatch(r"(?:\d+(?:\.\d+)?\s*(?:min|[smhd])\s*)+|\d+(?:\.\d+)?", text.strip())
    return sum(float(number) * _UNITS_S[unit or "s"] for number, unit in parts) if whole else None


def size(value: float | None) -> str:
    """Bytes in binary units, as memory is sold and `docker --shm-size` counts: ``64 MiB``, ``23.7 GiB``."""
    if value is None:
        return NOT_MEASURED
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < (999.5 if unit == "B" else 1023.95):
            return f"{value:.0f} B" if unit == "B" else f"{_one_decimal(value)} {unit}"
        value /= 1024
    return f"{_one_decimal(value)} TiB"


def used_of(used_bytes: float, total_bytes: float) -> str:
    """``12.3 of 24 GiB``."""
    return f"{_one_decimal(used_bytes / 1024**3)} of {_one_decimal(total_bytes / 1024**3)} GiB"


def watts(value: float | None) -> str:
    """``215 W``."""
    return NOT_MEASURED if value is None else f"{value:.0f} W"


def celsius(value: float | None) -> str:
    """``71 °C``."""
    return NOT_MEASURED if value is None else f"{value:.0f} °C"


def times(factor: float) -> str:
    """``3.1 ×``; near one with a digit more: ``1.04 ×``."""
    return f"{_factor(factor)} ×"


def speedup(predicted: tuple[float, float] | None) -> str | None:
    """A predicted gain as a range: ``2.6 to 3.1 × as fast``; where it may be none, ``up to 1.4 × as fast``."""
    if predicted is None:
        return None
    low, high = map(_factor, predicted)
    if low == high:
        return f"{low} × as fast"
    return f"up to {high} × as fast" if low == _factor(1.0) else f"{low} to {high} × as fast"


def capital(text: str) -> str:
    """``text`` as the beginning of a sentence; the rest keeps its case."""
    return text[:1].upper() + text[1:]


def clean(text: str) -> str:
    """Text that is safe to show: control codes, text-direction overrides and undecodable bytes made visible."""
    return "".join(_visible(character) for character in text)


def one_line(text: str) -> str:
    """Text that is safe to show, on one line."""
    return clean(" ".join(text.split()))


def brief(text: str, most: int) -> str:
    """Code on one line, cut where it is longer than ``most`` characters."""
    line = one_line(text)
    return line if len(line) <= most else line[: most - 1] + "…"


def _visible(character: str) -> str:
    if character.isprintable() or character in "\n\N{NO-BREAK SPACE}":
        return character
    if character == "\t":
        return " "
    # Cc: control codes, Cf: invisible marks such as direction overrides, Cs: bytes of a name that are not UTF-8.
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn") else " "


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def _one_decimal(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _factor(factor: float) -> str:
    if factor < 1.095:
        return f"{factor:.2f}"
    return f"{factor:.1f}" if factor < 9.95 else f"{factor:.0f}"
