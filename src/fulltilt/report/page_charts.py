"""Charts over time as inline SVG. The drawing stretches with the page; text and strokes keep their size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fulltilt import figures
from fulltilt.records import BUCKETS
from fulltilt.report.markup import Markup, element
from fulltilt.report.page_bars import bucket_class, swatch
from fulltilt.report.palette import BUCKET_TINTS
from fulltilt.report.scales import nice_top, tick_label, time_ticks
from fulltilt.report.series import Point

HEIGHT = 132
AXIS_HEIGHT = 20
# The inner drawing's own coordinates: a thousandth of the width or height is finer than a pixel.
GRAIN = 1000


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart, in the chart's own unit. ``colour`` is a style class."""

    label: str
    colour: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A level worth comparing with: a ceiling, a limit."""

    label: str
    value: float


@dataclass(frozen=True, slots=True)
class Chart:
    """What a line chart shows. ``scale`` turns the points' unit into ``unit``; ``top`` fixes the upper end."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    wall_s: float
    scale: float = 1.0
    top: float | None = None
    marks: tuple[Mark, ...] = ()
    epochs_s: tuple[float, ...] = ()


def line_chart(chart: Chart) -> Markup | None:
    """The chart, or None when there is nothing to draw."""
    lines = [line for line in chart.lines if line.points]
    if not lines or chart.wall_s <= 0:
        return None
    highest = max(point.high for line in lines for point in line.points) * chart.scale
    # A ceiling far above the data would flatten it; then it is only named.
    marks = [mark for mark in chart.marks if mark.value * chart.scale <= max(highest, 1e-9) * 4]
    top = chart.top or nice_top(max([highest, *(mark.value * chart.scale for mark in marks)]))
    drawing = [
        *(_rule(t_s / chart.wall_s) for t_s in chart.epochs_s),
        *(_band(line, chart, top) for line in lines),
        *(_level(mark.value * chart.scale / top) for mark in marks),
        *(_stroke(line, chart, top) for line in lines),
    ]
    legend = [(line.colour, line.label) for line in lines]
    named = [f"{mark.label} {figures.number(mark.value * chart.scale)}" for mark in chart.marks]
    return _figure(chart.title, chart.unit, legend, named, drawing, top, chart.wall_s, spoken=_spoken(chart, lines))


def ledger_chart(shares: Mapping[str, Sequence[float]], wall_s: float) -> Markup | None:
    """Where the time went over the run: buckets stacked to 100 %, compute at the bottom, data wait above it."""
    if not shares or wall_s <= 0:
        return None
    at_the_bottom = ("compute_s", "data_wait_s")
    names = [name for name in (*at_the_bottom, *(n for n in BUCKETS if n not in at_the_bottom)) if name in shares]
    bins = len(shares[names[0]])
    floor = [0.0] * bins
    drawing = []
    for name in names:
        ceiling = [low + share for low, share in zip(floor, shares[name], strict=True)]
        drawing.append(
            element(
                "path",
                d=_staircase(ceiling) + "L" + _staircase(floor, backwards=True)[1:] + "Z",
                class_=f"area {bucket_class(name)}",
                data_label=BUCKET_TINTS[name].label,
                data_shares=" ".join(f"{share * 100:.0f}" for share in shares[name]),
            )
        )
        floor = ceiling
    legend = [(bucket_class(name), BUCKET_TINTS[name].label) for name in names]
    spoken = "Share of each bucket over time: " + ", ".join(label for _, label in legend)
    return _figure("Time by cause", "share", legend, [], drawing, 100.0, wall_s, spoken=spoken, tick_unit=" %")


# --------------------------------------------------------------------------- drawing


def _place(point: Point, value: float, chart: Chart, top: float) -> str:
    x = round(min(max(point.t_s / chart.wall_s, 0.0), 1.0) * GRAIN)
    y = round((1 - min(max(value * chart.scale / top, 0.0), 1.0)) * GRAIN)
    return f"{x},{y}"


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Points between gaps."""
    runs: list[list[Point]] = []
    for point in points:
        if point.new_line or not runs:
            runs.append([])
        runs[-1].append(point)
    return runs


def _stroke(line: Line, chart: Chart, top: float) -> Markup:
    runs = (" ".join(_place(point, point.value, chart, top) for point in run) for run in _runs(line.points))
    # A lone point would have no length: a stroke to itself shows as a dot.
    d = "".join(f"M{run}" if " " in run else f"M{run} {run}" for run in runs)
    return element("path", d=d, class_=f"stroke {line.colour}", data_label=line.label)


def _band(line: Line, chart: Chart, top: float) -> Markup | None:
    if all(point.low == point.high for point in line.points):
        return None
    shapes = []
    for run in _runs(line.points):
        upper = [_place(point, point.high, chart, top) for point in run]
        lower = [_place(point, point.low, chart, top) for point in reversed(run)]
        shapes.append(f"M{' '.join(upper + lower)}Z")
    return element("path", d="".join(shapes), class_=f"band {line.colour}")


def _staircase(values: Sequence[float], backwards: bool = False) -> str:
    """Equal steps from left to right, as a path; the corners of neighbours at one height are left out."""
    corners: list[tuple[int, int]] = []
    for i, value in enumerate(values):
        y = round((1 - min(value, 1.0)) * GRAIN)
        left, right = round(i * GRAIN / len(values)), round((i + 1) * GRAIN / len(values))
        if corners and corners[-1][1] == y:
            corners[-1] = (right, y)
        else:
            corners += [(left, y), (right, y)]
    return "M" + " ".join(f"{x},{y}" for x, y in (reversed(corners) if backwards else corners))


def _level(height: float) -> Markup:
    y = round((1 - height) * GRAIN)
    return element("path", d=f"M0,{y} {GRAIN},{y}", class_="level")


def _rule(place: float) -> Markup:
    x = round(place * GRAIN)
    return element("path", d=f"M{x},0 {x},{GRAIN}", class_="epoch")


def _figure(
    title: str,
    unit: str,
    legend: Sequence[tuple[str, str]],
    named: Sequence[str],
    drawing: Sequence[Markup | None],
    top: float,
    wall_s: float,
    *,
    spoken: str,
    tick_unit: str = "",
) -> Markup:
    levels = (0.0, 0.5, 1.0)
    grid = [element("line", x2="100%", y1=y, y2=y, class_="grid") for level in levels for y in [level * HEIGHT]]
    ticks = [
        element(
            "text",
            label,
            x=f"{t_s / wall_s * 100:.2f}%",
            y=HEIGHT + AXIS_HEIGHT - 4,
            text_anchor="start" if t_s == 0 else "end" if t_s / wall_s > 0.95 else "middle",
        )
        for t_s, label in time_ticks(wall_s)
    ]
    inner = element(
        "svg",
        drawing,
        viewBox=f"0 0 {GRAIN} {GRAIN}",
        preserveAspectRatio="none",
        width="100%",
        height=HEIGHT,
        class_="drawing",
    )
    plot = element(
        "svg",
        grid,
        inner,
        ticks,
        class_="plot",
        width="100%",
        height=HEIGHT + AXIS_HEIGHT,
        role="img",
        aria_label=spoken,
    )
    labels = [element("span", tick_label(top * (1 - level)) + tick_unit) for level in levels]
    keys = [element("span", swatch(colour), label) for colour, label in legend] if len(legend) > 1 else []
    keys += [element("span", element("i", class_="dash"), text) for text in named]
    return element(
        "figure",
        element("figcaption", element("b", title), element("span", unit, class_="unit")),
        element("div", element("div", labels, class_="levels", aria_hidden="true"), plot, class_="frame"),
        element("div", keys, class_="keys") if keys else None,
        class_="chart",
        data_top=top,
        data_wall=wall_s,
        data_unit=unit,
    )


def _spoken(chart: Chart, lines: Sequence[Line]) -> str:
    """The chart in words, for those who do not see it."""
    ranges = []
    for line in lines:
        low = figures.number(min(point.low for point in line.points) * chart.scale)
        high = figures.number(max(point.high for point in line.points) * chart.scale)
        ranges.append(f"{line.label} between {low} and {high} {chart.unit}")
    return f"{chart.title} over {figures.seconds(chart.wall_s)}: {'; '.join(ranges)}"
