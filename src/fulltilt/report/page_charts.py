"""Bars and charts of the page, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fulltilt import figures
from fulltilt.diagnosis.ledger import launching_apart
from fulltilt.records import BUCKETS, Buckets, Diagnosis, GpuReading, Run, Sample, Span
from fulltilt.report import run_view
from fulltilt.report.legend import BUCKET_LEGEND, PHASE_LEGEND
from fulltilt.report.markup import Attribute, Markup, element
from fulltilt.report.run_view import Lane, Reported, StepPicture


def nice_top(highest: float) -> float:
    """The next round figure whose half is round as well."""
    if highest <= 0 or not math.isfinite(highest):
        return 1.0
    magnitude = 10.0 ** math.floor(math.log10(highest))
    return next(step * magnitude for step in (1, 2, 3, 4, 5, 6, 8, 10, 20) if step * magnitude >= highest * 0.9999)


# --------------------------------------------------------------------------- bars

BAR_HEIGHT = 40
# Pixels: the width of a bar on a desktop and on a phone, and of a character in its labels.
DESK_WIDTH, PHONE_WIDTH, CHARACTER_WIDTH = 900, 310, 7.5


def bucket_class(name: str) -> str:
    """The style class that colours a bucket."""
    return f"b-{name.removesuffix('_s')}"


def phase_class(phase: str) -> str:
    """The style class that colours a part of a step."""
    return f"p-{phase}"


def swatch(colour_class: str) -> Markup:
    """A small square in the colour of a style class."""
    square = element("rect", width=10, height=10, rx=2, class_=colour_class)
    return element("svg", square, class_="swatch", width=10, height=10, aria_hidden="true")


def ledger_bar(buckets: Buckets, order: Sequence[str], height: int = BAR_HEIGHT) -> Markup:
    """Where the time went, as one bar with the large parts named in it."""
    total_s = buckets.total_s
    sizes = [(name, getattr(buckets, name) / total_s) for name in order] if total_s > 0 else []
    labels = [f"{BUCKET_LEGEND[name].label} {figures.percent(size)}" for name, size in sizes]
    segments, start = [], 0.0
    for (name, size), label in zip(sizes, labels, strict=True):
        segments.append(_segment(start, size, label, bucket_class(name), height))
        start += size
    return _bar(segments, f"Where the time went: {', '.join(labels)}", height)


def ledger_table(reported: Reported, order: Iterable[str]) -> Markup:
    """The buckets as a table."""
    ledger = reported[1].ledger
    decimals = run_view.decimals(ledger.wall_s)
    rows = [
        element(
            "tr",
            element("th", swatch(bucket_class(name)), BUCKET_LEGEND[name].label, scope="row"),
            element("td", BUCKET_LEGEND[name].meaning, class_="meaning"),
            element("td", f"{getattr(ledger.buckets, name):.{decimals}f} s", class_="figure"),
            element("td", figures.percent(getattr(ledger.buckets, name) / ledger.wall_s), class_="figure strong"),
            element("td", figures.percent(run_view.bucket_after_startup(name, reported)), class_="figure"),
        )
        for name in order
    ]
    shares = (("of the wall time", "figure"), ("after start-up", "figure"))
    columns = (("bucket", None), ("what it is", "meaning"), ("time", "figure"), *shares)
    head = element("tr", [element("th", name, class_=class_, scope="col") for name, class_ in columns])
    return element("table", element("thead", head), element("tbody", rows), class_="ledger")


# --------------------------------------------------------------------------- one step


def step_lanes(picture: StepPicture, scale_s: float | None = None) -> Markup:
    """One step to scale, a bar for each lane. ``scale_s`` lets several steps share one scale."""
    scale_s = scale_s or picture.scale_s
    return element("div", [_lane(lane, scale_s) for lane in picture.lanes], class_="lanes")


def _lane(lane: Lane, scale_s: float) -> Markup:
    segments, legend, spoken = [], [], []
    for part in lane.parts:
        label = PHASE_LEGEND[part.phase].label
        figure = figures.seconds(part.length_s)
        colour = phase_class(part.phase)
        segments.append(_segment(part.start_s / scale_s, part.length_s / scale_s, label, colour, BAR_HEIGHT))
        spoken.append(f"{label} {figure}")
        legend.append(element("li", swatch(colour), label, " ", element("b", figure)))
    return element(
        "div",
        element("h3", lane.name),
        _bar(segments, f"{lane.name}: {', '.join(spoken)}", BAR_HEIGHT),
        element("ul", legend, class_="legend"),
        class_="lane",
    )


# --------------------------------------------------------------------------- parts of all bars


def _bar(segments: Sequence[Markup], spoken: str, height: int) -> Markup:
    return element("svg", segments, class_="bar", width="100%", height=height, role="img", aria_label=spoken)


def _segment(start: float, size: float, label: str, colour: str, height: int) -> Markup:
    """A part of a bar. Its label shows where it fits: everywhere, on a desktop only, or only on hover."""
    x, width = f"{start * 100:.3f}%", f"{size * 100:.3f}%"
    needed = len(label) * CHARACTER_WIDTH + 16
    fits_desk, fits_phone = size * DESK_WIDTH >= needed, size * PHONE_WIDTH >= needed
    text = None
    if fits_desk:
        # A nested svg has coordinates of its own, so that the text keeps its distance from the segment's edge.
        words = element("text", label, x=8, y="50%", dy="0.35em", class_=f"t-{colour}")
        text = element("svg", words, x=x, width=width, height=height, class_=None if fits_phone else "desk-only")
    return element("g", element("title", label), element("rect", x=x, width=width, height=height, class_=colour), text)


# --------------------------------------------------------------------------- charts

HEIGHT = 132
AXIS_HEIGHT = 20
# The drawing's coordinates run from 0 to this, finer than a pixel.
GRAIN = 1000


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. ``colour`` is a style class."""

    label: str
    colour: str
    points: tuple[ChartPoint, ...]


def line_chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    wall_s: float,
    *,
    scale: float = 1.0,
    top: float | None = None,
    marks: Sequence[tuple[str, float | None]] = (),
) -> Markup | None:
    """The chart, or None when there is nothing to draw.

    ``scale`` converts the points to ``unit``; ``top`` fixes the upper end; ``marks`` are named levels to compare with,
    such as a ceiling or a limit.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    known = [(name, value * scale) for name, value in marks if value is not None]
    highest = max(point.value for line in lines for point in line.points) * scale
    # A ceiling far above the data would flatten it, so it is only named.
    levels = [value for _, value in known if value <= max(highest, 1e-9) * 4]
    full = top or nice_top(max([highest, *levels]))

    def place(point: ChartPoint) -> str:
        x = round(min(max(point.t_s / wall_s, 0.0), 1.0) * GRAIN)
        return f"{x},{round((1 - min(max(point.value * scale / full, 0.0), 1.0)) * GRAIN)}"

    heights = [round((1 - value / full) * GRAIN) for value in levels]
    drawing = [
        *(element("path", d=f"M0,{y} {GRAIN},{y}", class_="level") for y in heights),
        *(_stroke(line, place) for line in lines),
    ]
    legend = [(line.colour, line.label) for line in lines]
    named = [f"{name} {figures.number(value)}" for name, value in known]
    # The chart in words, for screen readers.
    ranges = []
    for line in lines:
        low, high = (figures.number(edge(point.value for point in line.points) * scale) for edge in (min, max))
        ranges.append(f"{line.label} between {low} and {high} {unit}")
    spoken = f"{title} over {figures.seconds(wall_s)}: {'; '.join(ranges)}"
    return _figure(title, unit, legend, named, drawing, full, wall_s, spoken=spoken)


def ledger_chart(shares: Mapping[str, Sequence[float]], wall_s: float) -> Markup | None:
    """Where the time went over the run: buckets stacked to 100 %, compute at the bottom, data wait above it."""
    if not shares:
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
                data_label=BUCKET_LEGEND[name].label,
                data_shares=" ".join(f"{share * 100:.0f}" for share in shares[name]),
            )
        )
        floor = ceiling
    legend = [(bucket_class(name), BUCKET_LEGEND[name].label) for name in names]
    spoken = "Share of each bucket over time: " + ", ".join(label for _, label in legend)
    return _figure("Time by cause", "% of the time", legend, [], drawing, 100.0, wall_s, spoken=spoken)


# --------------------------------------------------------------------------- drawing


def _stroke(line: Line, place: Callable[[ChartPoint], str]) -> Markup:
    runs: list[list[str]] = []  # points between gaps
    for point in line.points:
        if point.new_line or not runs:
            runs.append([])
        runs[-1].append(place(point))
    # A line from a single point to itself shows as a dot.
    d = "".join(f"M{' '.join(run if len(run) > 1 else run * 2)}" for run in runs)
    return element("path", d=d, class_=f"stroke {line.colour}", data_label=line.label)


def _staircase(values: Sequence[float], backwards: bool = False) -> str:
    """Equal steps from left to right, as a path without corners between steps of one height."""
    corners: list[tuple[int, int]] = []
    for i, value in enumerate(values):
        y = round((1 - min(value, 1.0)) * GRAIN)
        left, right = round(i * GRAIN / len(values)), round((i + 1) * GRAIN / len(values))
        if corners and corners[-1][1] == y:
            corners[-1] = (right, y)
        else:
            corners += [(left, y), (right, y)]
    return "M" + " ".join(f"{x},{y}" for x, y in (reversed(corners) if backwards else corners))


def _figure(
    title: str,
    unit: str,
    legend: Sequence[tuple[str, str]],
    named: Sequence[str],
    drawing: Sequence[Markup],
    top: float,
    wall_s: float,
    *,
    spoken: str,
) -> Markup:
    levels = (0.0, 0.5, 1.0)
    whole = HEIGHT + AXIS_HEIGHT
    grid = [element("line", x2="100%", y1=level * HEIGHT, y2=level * HEIGHT, class_="grid") for level in levels]
    ticks = [
        element("text", figures.seconds(level * wall_s), x=f"{level:.0%}", y=whole - 4, text_anchor=anchor)
        for level, anchor in zip(levels, ("start", "middle", "end"), strict=True)
    ]
    box: dict[str, Attribute] = {"viewBox": f"0 0 {GRAIN} {GRAIN}", "preserveAspectRatio": "none"}
    inner = element("svg", drawing, width="100%", height=HEIGHT, class_="drawing", **box)
    plot = element("svg", grid, inner, ticks, width="100%", height=whole, class_="plot", role="img", aria_label=spoken)
    labels = [element("span", figures.number(top * (1 - level))) for level in levels]
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


# --------------------------------------------------------------------------- figures over time, averaged for drawing

# A chart is some 700 pixels wide: more points would not show.
POINTS = 150
# Batches may arrive in bursts: then one step seems to take no time, and the next one twice its time.
STEPS_A_RATE = 8

# Begin and end of a reading, its amount, and what that is divided by.
Reading = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A point of a line: the mean over some time. ``new_line``: there is a gap before it."""

    t_s: float
    value: float
    new_line: bool = False


def thinned(readings: Iterable[Reading], wall_s: float, points: int = POINTS) -> tuple[ChartPoint, ...]:
    """The mean of the readings that end in each of ``points`` equal parts of the wall time."""
    drawn: list[ChartPoint] = []
    ended_s = -math.inf
    for _, group in groupby(readings, key=lambda reading: min(int(reading[1] * points / wall_s), points - 1)):
        begins, ends, amounts, sizes = zip(*group, strict=True)
        # Half a point of slack: clocks are rounded when they are stored.
        gap = begins[0] - ended_s > (ends[-1] - begins[0]) / 2
        drawn.append(ChartPoint((begins[0] + ends[-1]) / 2, sum(amounts) / sum(sizes), new_line=gap))
        ended_s = ends[-1]
    return tuple(drawn)


def throughput(spans: Iterable[Span], wall_s: float) -> tuple[ChartPoint, ...]:
    """Samples per second of one rank while it made steps, each over several steps."""
    counted = [span for span in spans if span.steps > 0 and span.samples is not None and span.t1_s > span.t0_s]
    rates = sum(span.steps for span in counted) / STEPS_A_RATE
    rate_s = sum(span.t1_s - span.t0_s for span in counted) / max(rates, 1.0)
    points = max(min(int(wall_s / rate_s), POINTS), 1) if counted else 1
    return thinned(((s.t0_s, s.t1_s, s.samples or 0, s.t1_s - s.t0_s) for s in counted), wall_s, points)


def data_wait(spans: Iterable[Span], wall_s: float) -> tuple[ChartPoint, ...]:
    """Seconds of data wait in each step of one rank."""
    return thinned(((s.t0_s, s.t1_s, s.buckets.data_wait_s, s.steps) for s in spans if s.steps > 0), wall_s)


def ledger_over_time(spans: Sequence[Span], wall_s: float, bins: int = POINTS) -> dict[str, tuple[float, ...]]:
    """The share of each bucket in ``bins`` equal slices of the wall time, without empty buckets."""
    width_s = wall_s / bins
    slices = {name: [0.0] * bins for name in BUCKETS}
    for span in spans:
        length_s = span.t1_s - span.t0_s
        if length_s <= 0:
            continue
        amounts = [(slices[name], amount) for name in BUCKETS if (amount := getattr(span.buckets, name)) > 0]
        for i in range(max(int(span.t0_s / width_s), 0), min(int(span.t1_s / width_s), bins - 1) + 1):
            overlap_s = min(span.t1_s, (i + 1) * width_s) - max(span.t0_s, i * width_s)
            for column, amount in amounts:
                column[i] += amount / length_s * overlap_s / width_s
    return {name: tuple(column) for name, column in slices.items() if any(share > 1e-9 for share in column)}


# A sample with the begin and end of the time that it describes.
Timed = tuple[float, float, Sample]


def timed(samples: Sequence[Sample]) -> list[Timed]:
    """The samples of the first machine; those of other machines come after them, again from the start."""
    later = (place for place in range(1, len(samples)) if samples[place].t_s < samples[place - 1].t_s)
    samples = samples[: next(later, len(samples))]
    moments = [sample.t_s for sample in samples]
    first_s = max(2 * moments[0] - moments[1], 0.0) if len(moments) > 1 else sum(moments)
    return list(zip([first_s, *moments[:-1]], moments, samples, strict=False))


def wall_seconds(run: Run, ledger_wall_s: float) -> float:
    """The length of the time axis: the ledger's wall time, or the time of the last sample."""
    return max([ledger_wall_s, *(sample.t_s for sample in run.samples[-1:])])


# --------------------------------------------------------------------------- the run over time

GIB = 1 / (1 << 30)
MB = 1e-6
# At most so many GPUs are charted on a page; `fulltilt watch` shows all.
MOST_GPUS = 16


def step_charts(run: Run, diagnosis: Diagnosis) -> list[Markup]:
    """Throughput, data wait and the ledger over time, of the first rank."""
    wall_s = wall_seconds(run, diagnosis.ledger.wall_s)
    if not run.spans or not run.ranks or diagnosis.throughput.steps == 0 or wall_s <= 0:
        return []
    spans = launching_apart(run.ranks[0], run.spans[0])
    of_rank = f", rank {run.ranks[0].rank}" if len(run.ranks) > 1 else ""
    compute, loader = diagnosis.ceilings.compute_samples_per_s, diagnosis.ceilings.loader_samples_per_s
    marks = () if of_rank else (("compute ceiling", compute), ("loader ceiling", loader))
    speed = [Line("throughput", "c-compute", throughput(spans, wall_s))]
    wait = [Line("data wait", "c-data", data_wait(spans, wall_s))]
    charts = [
        line_chart(f"Throughput{of_rank}", "samples/s", speed, wall_s, marks=marks),
        line_chart(f"Data wait{of_rank}", "ms a step", wait, wall_s, scale=1000.0),
        ledger_chart(ledger_over_time(spans, wall_s), wall_s),
    ]
    return [chart for chart in charts if chart is not None]


def machine_charts(run: Run, diagnosis: Diagnosis) -> list[Markup]:
    """GPU, CPU, memory and disk over time, as far as measured."""
    wall_s = wall_seconds(run, diagnosis.ledger.wall_s)
    if wall_s <= 0:
        return []
    samples = timed(run.samples)
    machine = run.run.machine
    charts: list[Markup | None] = []

    def add(title: str, unit: str, readings: list[Any], *lines: tuple[str, str, str], **options: Any) -> None:
        """Add a chart; each of ``lines`` is a label, a colour and the name of a field of the readings."""
        drawn = []
        for label, colour, name in lines:
            known = ((t0_s, t1_s, getattr(reading, name)) for t0_s, t1_s, reading in readings)
            points = thinned(((*times, value, 1.0) for *times, value in known if value is not None), wall_s)
            drawn.append(Line(label, colour, points))
        charts.append(line_chart(title, unit, drawn, wall_s, **options))

    hosts = [(t0_s, t1_s, sample.host) for t0_s, t1_s, sample in samples]
    gpus: dict[str, list[tuple[float, float, GpuReading]]] = {}
    for t0_s, t1_s, sample in samples:
        for gpu in sample.gpus:
            gpus.setdefault(gpu.uuid, []).append((t0_s, t1_s, gpu))
    for own in list(gpus.values())[:MOST_GPUS]:
        gpu = own[-1][2]
        name = f"GPU {gpu.index}"
        use = (("any kernel running", "c-compute", "util_pct"), ("SM active", "c-second", "sm_active_pct"))
        vram_gib = gpu.vram_total_bytes * GIB if gpu.vram_total_bytes else None
        add(f"{name} use", "%", own, *use, top=100.0)
        add(f"{name} memory", "GiB", own, ("used", "c-compute", "vram_used_bytes"), scale=GIB, top=vram_gib)
        add(f"{name} power", "W", own, ("power", "c-compute", "power_w"), marks=[("limit", gpu.power_limit_w)])
    job = ("CPUs", "c-second", "tree_cpu_pct")
    cpu = (("busy", "c-second", "cpu_pct"), ("waiting for storage", "c-data", "iowait_pct"))
    memory = (("this job", "c-second", "tree_pss_bytes"), ("in use in total", "c-grey", "mem_used_bytes"))
    disk = (("read", "c-second", "disk_read_bytes_per_s"), ("written", "c-data", "disk_write_bytes_per_s"))
    limit_bytes = machine.mem_limit_bytes or machine.mem_total_bytes
    add("CPUs used by the job", "CPUs", hosts, job, scale=0.01, marks=[("usable", machine.cpu.usable * 100)])
    add("CPU of the whole machine", "%", hosts, *cpu, top=100.0)
    add("Memory", "GiB", hosts, *memory, scale=GIB, marks=[("limit", limit_bytes)])
    add("Disk", "MB/s", hosts, *disk, scale=MB)
    return [chart for chart in charts if chart is not None]


def chart_grid(charts: list[Markup], wide: bool = False) -> Markup | None:
    """Charts side by side where there is room; None without any."""
    return element("div", charts, class_="charts wide" if wide else "charts") if charts else None
