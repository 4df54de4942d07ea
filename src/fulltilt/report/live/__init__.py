"""The watch screen: charts over time of each GPU, the host below them, and the jobs. As large as the window allows."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from fulltilt.figures import clean
from fulltilt.report.live.gpus import gpu_block, gpu_line
from fulltilt.report.live.host import core_lines, host_block
from fulltilt.report.live.jobs import job_lines
from fulltilt.report.live.parts import DIM, HEAD, PLAIN, WatchView, side_by_side, spread

__all__ = ["WatchView", "watch_lines"]

_GPU_WIDTH = 76  # below this a GPU's figures do not fit beside its name, and a chart is too short to show a trend
_MOST_ROWS = 12
_JOB_ROWS = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of each chart, blank lines between the parts, and whether each GPU gets one line only."""

    rows: int
    gap: int
    compact: bool = False


_LAYOUTS = (
    *(Layout(rows, gap=1) for rows in range(_MOST_ROWS, 1, -1)),
    Layout(2, gap=0),
    Layout(1, gap=1),
    Layout(1, gap=0),
    Layout(1, gap=1, compact=True),
    Layout(1, gap=0, compact=True),
)


def watch_lines(view: WatchView, width: int, height: int) -> list[Text]:
    """The screen as at most ``height`` lines of at most ``width`` cells, in the roomiest layout that fits."""
    jobs = 2 + min(max(1, len(view.jobs)), _JOB_ROWS)
    fitting = (layout for layout in _LAYOUTS if _height(view, width, layout) + layout.gap + jobs <= height)
    layout = next(fitting, _LAYOUTS[-1])
    blank = [Text()] * layout.gap
    lines = [*_machine(view, width, layout), *blank]
    lines += job_lines(view, width, max(0, height - len(lines)))
    if len(lines) > height:
        lines = [*lines[: max(0, height - 1)], Text("… enlarge the window to see the rest", DIM)]
    for line in lines:
        line.no_wrap = True
        line.truncate(width)
    return lines[:height]


def _machine(view: WatchView, width: int, layout: Layout) -> list[Text]:
    """Everything above the jobs."""
    blank = [Text()] * layout.gap
    gpus = range(len(view.now.gpus))
    lines = [_header(view, width), *blank]
    if not gpus:
        lines.append(Text("no GPU", HEAD).append(f"  {clean(view.why_no_gpu or 'none was found')}", PLAIN))
    elif layout.compact:
        lines += [gpu_line(view, place, width) for place in gpus]
    else:
        columns = _columns(view, width)
        column_width = (width - 2 * (columns - 1)) // columns
        for first in gpus[::columns]:
            row = [gpu_block(view, place, column_width, layout.rows) for place in gpus[first : first + columns]]
            lines += [*side_by_side(row, column_width), *blank]
        lines = lines[: len(lines) - layout.gap]
    return [*lines, *blank, *host_block(view, width, _host_rows(view, layout))]


def _height(view: WatchView, width: int, layout: Layout) -> int:
    """How many lines `_machine` gives, without drawing them."""
    gpus = len(view.now.gpus)
    if not gpus or layout.compact:
        middle = max(1, gpus)
    else:
        has_gpm = any(gpu.sm_active_pct is not None for sample in view.samples for gpu in sample.gpus)
        rows = -(-gpus // _columns(view, width))
        middle = rows * (1 + (3 if has_gpm else 2) * layout.rows) + (rows - 1) * layout.gap
    cores = len(core_lines(view.now.host.cpu_per_core_pct or (), width, view.blocks))
    return 1 + layout.gap + middle + layout.gap + 1 + _host_rows(view, layout) + cores + 2


def _columns(view: WatchView, width: int) -> int:
    return max(1, min(len(view.now.gpus), width // _GPU_WIDTH))


def _host_rows(view: WatchView, layout: Layout) -> int:
    """The host's chart is the largest only where there is no GPU."""
    return min(layout.rows, 3) if view.now.gpus else layout.rows


def _header(view: WatchView, width: int) -> Text:
    left = Text("fulltilt watch", HEAD).append(clean(f"  {view.hostname}  {view.clock}"), PLAIN)
    ends = ["q quits", f"every {view.interval_s:g} s, q quits"]
    if view.recording is not None:
        ends.append(f"recording to {clean(view.recording)}, {ends[-1]}")
    fitting = [end for end in ends if left.cell_len + 2 + len(end) <= width]
    return spread(left, Text(fitting[-1] if fitting else "", DIM), width)
