"""What the watch screen is made of: a view of the machine, charts with their figures, lines with two ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from fulltilt import figures
from fulltilt.records import HostReading, JobProcess, Sample
from fulltilt.report.blocks import chart_rows

GIB = 1024**3

HEAD, PLAIN, DIM = "bold", "not bold", "dim"
LABEL_WIDTH = 14


@dataclass(frozen=True, slots=True)
class WatchView:
    """Everything that the screen shows. ``samples`` go from the oldest to the newest; at first there are none."""

    hostname: str
    clock: str
    interval_s: float
    samples: Sequence[Sample]
    jobs: tuple[JobProcess, ...] = ()
    why_no_gpu: str | None = None
    recording: str | None = None
    blocks: bool = True

    @property
    def now(self) -> Sample:
        """The newest sample."""
        return self.samples[-1] if self.samples else Sample(0.0, HostReading())


def series(
    label: str,
    values: Sequence[float | None],
    style: str,
    width: int,
    rows: int,
    blocks: bool,
    note: str | None = None,
) -> list[Text]:
    """A chart of per cents with its newest figure at the left, and below that a note (otherwise the mean)."""
    charts = chart_rows(values, max(0, width - LABEL_WIDTH), rows, 100.0, blocks=blocks)
    below = _mean(values[-max(1, width - LABEL_WIDTH) :]) if note is None else note
    heads = [
        label_text(label, values[-1] if values else None),
        Text(below[: LABEL_WIDTH - 1].ljust(LABEL_WIDTH), DIM),
        *(Text(" " * LABEL_WIDTH) for _ in charts),
    ]
    return [head.append(chart, f"not dim {style}") for head, chart in zip(heads, charts, strict=False)]


def label_text(label: str, pct: float | None) -> Text:
    """The left margin of a chart: its name and its figure."""
    return Text(f"{label:<6}{figures.pct(pct):>6}".ljust(LABEL_WIDTH))


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"mean {sum(known) / len(known):>5.0f} %" if known else ""


def spread(left: Text, right: Text, width: int) -> Text:
    """One text at the left edge, one at the right; the left one gives way where both do not fit."""
    room = width - right.cell_len - 2
    if room < 12:
        return left
    left.truncate(room, overflow="ellipsis")
    return Text.assemble(left, " " * (width - left.cell_len - right.cell_len), right)


def side_by_side(blocks: Sequence[list[Text]], width: int) -> list[Text]:
    """Blocks of lines in columns of that width."""
    lines = []
    for row in itertools.zip_longest(*blocks, fillvalue=Text()):
        line = Text()
        for text in row[:-1]:
            padded = text.copy()
            padded.truncate(width)
            padded.pad_right(width + 2 - padded.cell_len)
            line.append_text(padded)
        lines.append(line.append_text(row[-1].copy()))
    return lines
