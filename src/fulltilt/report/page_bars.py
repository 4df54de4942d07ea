"""Bars of the page: the ledger, the lanes of a step, speed against its ceilings. Widths are shares, so they scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fulltilt import figures
from fulltilt.records import Buckets, Ceilings, Ledger, Throughput
from fulltilt.report import wording
from fulltilt.report.markup import Markup, element
from fulltilt.report.palette import BUCKET_TINTS, PHASE_TINTS
from fulltilt.report.step import Lane, StepPicture

BAR_HEIGHT = 40
# Widths in pixels that a bar has on a desk and on a phone, and that a character of its labels takes.
DESK_WIDTH, PHONE_WIDTH, CHARACTER_WIDTH = 900, 310, 7.5


def bucket_class(name: str) -> str:
    """The style class that colours a bucket."""
    return f"b-{name.removesuffix('_s')}"


def phase_class(kind: str) -> str:
    """The style class that colours a part of a step."""
    return f"p-{kind}"


def swatch(colour_class: str) -> Markup:
    """A small square in a colour of the palette."""
    square = element("rect", width=10, height=10, rx=2, class_=colour_class)
    return element("svg", square, class_="swatch", width=10, height=10, aria_hidden="true")


def ledger_bar(buckets: Buckets, order: Sequence[str], height: int = BAR_HEIGHT) -> Markup:
    """Where the time went, as one bar with the large parts named in it."""
    total_s = buckets.total_s
    sizes = [(name, getattr(buckets, name) / total_s) for name in order] if total_s > 0 else []
    spoken = ", ".join(f"{BUCKET_TINTS[name].label} {figures.percent(size)}" for name, size in sizes)
    segments = []
    start = 0.0
    for name, size in sizes:
        tint = BUCKET_TINTS[name]
        segments.append(_segment(start, size, f"{tint.label} {figures.percent(size)}", bucket_class(name), height))
        start += size
    return _bar(segments, f"Where the time went: {spoken}", height)


def ledger_table(ledger: Ledger, order: Iterable[str]) -> Markup:
    """The buckets in words and figures."""
    decimals = wording.decimals(ledger.wall_s)
    rows = [
        element(
            "tr",
            element("th", swatch(bucket_class(name)), BUCKET_TINTS[name].label, scope="row"),
            element("td", BUCKET_TINTS[name].meaning, class_="meaning"),
            element("td", f"{getattr(ledger.buckets, name):.{decimals}f} s", class_="figure"),
            element("td", figures.percent(getattr(ledger.buckets, name) / ledger.wall_s), class_="figure strong"),
        )
        for name in order
    ]
    head = element(
        "tr",
        element("th", "bucket", scope="col"),
        element("th", "what it is", class_="meaning", scope="col"),
        element("th", "time", class_="figure", scope="col"),
        element("th", "share", class_="figure", scope="col"),
    )
    return element("table", element("thead", head), element("tbody", rows), class_="ledger")


# --------------------------------------------------------------------------- one step


def step_lanes(picture: StepPicture, scale_s: float | None = None) -> Markup:
    """One step to scale: a bar for each of those who work at it. ``scale_s`` lets several steps share one scale."""
    scale_s = scale_s or picture.scale_s
    return element("div", [_lane(lane, scale_s) for lane in picture.lanes], class_="lanes")


def _lane(lane: Lane, scale_s: float) -> Markup:
    segments, legend, spoken = [], [], []
    for part in lane.parts:
        label = PHASE_TINTS[part.kind].label
        figure = figures.seconds(part.length_s)
        colour = phase_class(part.kind)
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


# --------------------------------------------------------------------------- speed


def speed_bars(throughput: Throughput, ceilings: Ceilings) -> Markup | None:
    """What the job reaches beside what the loader and the GPU could each do alone."""
    rates = [
        ("this run", throughput.samples_per_s, "speed-now"),
        ("the loader alone", ceilings.loader_samples_per_s, "speed-loader"),
        ("computing alone", ceilings.compute_samples_per_s, "speed-compute"),
    ]
    known = [(name, rate, colour) for name, rate, colour in rates if rate is not None]
    top = max((rate for _, rate, _ in known), default=0.0)
    if len(known) < 2 or top <= 0:
        return None
    rows = [
        element(
            "div",
            element("span", name, class_="speed-name"),
            _bar([_segment(0.0, rate / top, "", colour, 14)], f"{name}: {figures.number(rate)} samples/s", 14),
            element("span", element("b", figures.number(rate)), " samples/s", class_="speed-rate"),
            class_="speed-row",
        )
        for name, rate, colour in known
    ]
    return element("div", rows, class_="speeds")


# --------------------------------------------------------------------------- parts of all bars


def _bar(segments: Sequence[Markup], spoken: str, height: int) -> Markup:
    return element("svg", segments, class_="bar", width="100%", height=height, role="img", aria_label=spoken)


def _segment(start: float, size: float, label: str, colour: str, height: int) -> Markup:
    """A stretch of a bar. Its label shows where it fits: everywhere, on a desk only, or only when pointed at."""
    x, width = f"{start * 100:.3f}%", f"{size * 100:.3f}%"
    needed = len(label) * CHARACTER_WIDTH + 16
    fits_desk, fits_phone = size * DESK_WIDTH >= needed, size * PHONE_WIDTH >= needed
    text = None
    if label and fits_desk:
        # A nested svg starts its own coordinates, so that the text stands a fixed distance from the segment's edge.
        words = element("text", label, x=8, y="50%", dy="0.35em", class_=f"t-{colour}")
        text = element("svg", words, x=x, width=width, height=height, class_=None if fits_phone else "desk-only")
    title = element("title", label) if label else None
    return element("g", title, element("rect", x=x, width=width, height=height, class_=colour), text)
