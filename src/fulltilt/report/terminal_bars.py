"""What the terminal view is made of: bars of characters, the step to scale, headings, hanging text.

Where the screen has colours, parts are told apart by colour, else by pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fulltilt import figures
from fulltilt.records import Buckets
from fulltilt.report.palette import BUCKET_TINTS, IDLE, PHASE_TINTS, Tint
from fulltilt.report.step import Lane, StepPicture


@dataclass(frozen=True, slots=True)
class Ink:
    """What the screen can show: colours, or only patterns; block characters, or only ASCII."""

    colour: bool
    blocks: bool

    @classmethod
    def of(cls, console: Console) -> Ink:
        """The ink of a console."""
        colour = console.color_system is not None and not console.no_color
        return cls(colour, blocks=console.encoding.lower().replace("-", "").startswith("utf"))

    def fill(self, tint: Tint, place: int) -> tuple[str, str]:
        """The character and the style of a segment. Without colour, patterns go by ``place``: neighbours differ."""
        if self.colour:
            return ("█" if self.blocks else "#"), tint.colour
        if tint.label == "compute":
            return ("█" if self.blocks else "#"), ""
        if tint.label == "data wait":
            return ("░" if self.blocks else "."), ""
        return (("▓", "▒") if self.blocks else ("=", "-"))[place % 2], ""

    @property
    def bullet(self) -> str:
        """What stands before a line of evidence."""
        return "·" if self.blocks else "-"

    @property
    def arrow(self) -> str:
        """What stands before a fix."""
        return "→" if self.blocks else "->"


def split_cells(lengths: Sequence[float], width: int) -> list[int]:
    """``width`` cells shared out in proportion (largest remainder), so that a bar is always full."""
    total = sum(lengths)
    if total <= 0:
        return [0] * len(lengths)
    exact = [length / total * width for length in lengths]
    cells = [int(cell) for cell in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: exact[i] - cells[i], reverse=True)
    for i in by_remainder[: width - sum(cells)]:
        cells[i] += 1
    return cells


def bucket_parts(buckets: Buckets, order: Iterable[str]) -> list[tuple[Tint, float]]:
    """Buckets with their tints, in the given order."""
    return [(BUCKET_TINTS[name], getattr(buckets, name)) for name in order]


def ledger_bar(parts: Sequence[tuple[Tint, float]], width: int, ink: Ink) -> Text:
    """One line in which each part has its share of ``width`` characters. Empty parts keep their place and pattern."""
    bar = Text(no_wrap=True)
    cells = split_cells([length for _, length in parts], width)
    for place, ((tint, _), count) in enumerate(zip(parts, cells, strict=True)):
        character, style = ink.fill(tint, place)
        bar.append(character * count, style)
    return bar


def step_lines(picture: StepPicture, width: int, ink: Ink) -> list[Text]:
    """One step as a picture: each part on a line of its own, at its place and to scale, with its length."""
    name_width = max(len(PHASE_TINTS[part.kind].label) for lane in picture.lanes for part in lane.parts)
    figures = _Figures.of(picture)
    bar_width = max(width - name_width - figures.width - 6, 3)
    lines = []
    for lane in picture.lanes:
        lines.append(Text(lane.name, "bold", no_wrap=True, overflow="ellipsis"))
        lines += _lane_lines(lane, picture.scale_s, name_width, bar_width, figures, ink)
    return lines


@dataclass(frozen=True, slots=True)
class _Figures:
    """The columns of the lengths and of their shares of the whole width."""

    seconds_width: int
    share_width: int

    @classmethod
    def of(cls, picture: StepPicture) -> _Figures:
        lengths = [part.length_s for lane in picture.lanes for part in lane.parts]
        return cls(
            max(len(figures.seconds(length)) for length in [picture.scale_s, *lengths]),
            max(len(figures.percent(length / picture.scale_s)) for length in [picture.scale_s, *lengths]),
        )

    @property
    def width(self) -> int:
        return self.seconds_width + 2 + self.share_width

    def row(self, length_s: float, share: float) -> str:
        return f"{figures.seconds(length_s):>{self.seconds_width}}  {figures.percent(share):>{self.share_width}}"


def _lane_lines(lane: Lane, scale_s: float, name_width: int, bar_width: int, figures: _Figures, ink: Ink) -> list[Text]:
    lines = []
    for part in lane.parts:
        tint = PHASE_TINTS[part.kind]
        start = round(part.start_s / scale_s * bar_width)
        end = max(round((part.start_s + part.length_s) / scale_s * bar_width), start + 1)
        if end > bar_width:
            start, end = start - (end - bar_width), bar_width
        line = Text("  ", no_wrap=True).append(tint.label.ljust(name_width + 1), "dim" if part.kind == IDLE else "")
        line.append(" " * start)
        if part.kind == IDLE:
            line.append(("┄" if ink.blocks else ".") * (end - start), "dim")
        else:
            line.append(("█" if ink.blocks else "#") * (end - start), tint.colour if ink.colour else "")
        line.append(" " * (bar_width - end))
        figure = figures.row(part.length_s, part.length_s / scale_s)
        lines.append(line.append(f"  {figure}", "dim" if part.kind == IDLE else ""))
    return lines


def heading(console: Console, name: str, detail: str = "") -> None:
    """The title of a part, after an empty line."""
    console.print()
    console.print(Text(name, "bold underline").append(f"  {detail}" if detail else "", "not bold not underline dim"))


def hanging(mark: str, text: Text, indent: int = 4) -> Padding:
    """Text that wraps under itself, not under its mark."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(mark, text)
    return Padding(table, (0, 0, 0, indent), expand=False)
