"""Durations as people write them."""

from __future__ import annotations

import re

_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(text: str) -> float | None:
    """Seconds of ``90``, ``90s``, ``30m``, ``11h`` or ``1h30m``; None when it is no duration."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smhd])?\s*", text.strip())
    whole = re.fullmatch(r"(?:\d+(?:\.\d+)?\s*(?:min|[smhd])\s*)+|\d+(?:\.\d+)?", text.strip())
    return sum(float(number) * _SECONDS[unit or "s"] for number, unit in parts) if whole else None
