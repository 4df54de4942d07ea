"""Charts and bars of block characters: an eighth of a cell is the finest step."""

from __future__ import annotations

from collections.abc import Sequence

UPWARD = " ▁▂▃▄▅▆▇█"
RIGHTWARD = " ▏▎▍▌▋▊▉█"
ASCII = " .:-=+*%#"


def chart_rows(
    values: Sequence[float | None], width: int, height: int, top: float, *, blocks: bool = True
) -> list[str]:
    """The newest ``width`` values as columns, ``height`` rows of text from the top down, the newest at the right.

    A value of 0 shows as the thinnest block, so that it differs from None, which stays blank.
    """
    glyphs = UPWARD if blocks else ASCII
    shown = list(values)[-width:] if width > 0 else []
    levels = [_level(value, height, top) for value in shown]
    blank = " " * (width - len(shown))
    return [
        blank + "".join(glyphs[min(max(level - 8 * row, 0), 8)] for level in levels) for row in reversed(range(height))
    ]


def _level(value: float | None, height: int, top: float) -> int:
    if value is None:
        return 0
    share = min(max(value / top, 0.0), 1.0) if top > 0 else 0.0
    return max(1, round(share * height * 8))


def bar(share: float, width: int, *, blocks: bool = True) -> str:
    """A bar from the left, ``share`` of ``width`` cells long, padded with spaces."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    glyphs = RIGHTWARD if blocks else ASCII
    text = glyphs[8] * full + (glyphs[rest] if rest else "")
    return text.ljust(width)


def cells(values: Sequence[float | None], top: float, *, blocks: bool = True) -> str:
    """One character a value, for many values in little room."""
    return chart_rows(values, len(values), 1, top, blocks=blocks)[0] if values else ""
