"""What happened over time, thinned for drawing: a run of a million steps fits into the same few points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean
from typing import Generic, TypeVar

from fulltilt.records import BUCKETS, GpuReading, Run, Sample, Span

Reading = TypeVar("Reading")

# A chart is some 700 pixels wide: more points than this cannot be seen, only downloaded.
POINTS = 150
# Workers hand over their batches together: one step then seems to take no time, and the next one twice its time.
STEPS_A_RATE = 8


@dataclass(frozen=True, slots=True)
class Stretch:
    """A value that held from ``t0_s`` to ``t1_s``, with the extremes seen in it."""

    t0_s: float
    t1_s: float
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a line: the mean over a stretch of time and its extremes. ``new_line``: there is a gap before it."""

    t_s: float
    value: float
    low: float
    high: float
    new_line: bool = False


def thin(stretches: Sequence[Stretch], wall_s: float, points: int = POINTS) -> tuple[Point, ...]:
    """About ``points`` points at most. The minimum and the maximum survive; gaps stay gaps."""
    if len(stretches) <= points or wall_s <= 0:
        return _as_points(stretches)
    return _as_points(_merge(stretches, wall_s / points))


def _as_points(stretches: Sequence[Stretch]) -> tuple[Point, ...]:
    # Half a stretch of slack: clocks are rounded when they are stored.
    return tuple(
        Point(
            (one.t0_s + one.t1_s) / 2,
            one.value,
            one.low,
            one.high,
            new_line=before is None or one.t0_s - before.t1_s > (one.t1_s - one.t0_s) / 2,
        )
        for before, one in zip([None, *stretches], stretches, strict=False)
    )


def _merge(stretches: Iterable[Stretch], width_s: float) -> list[Stretch]:
    """One stretch for each ``width_s`` of time in which there is any."""
    slots = groupby(stretches, key=lambda one: int((one.t0_s + one.t1_s) / 2 / width_s))
    return [_together(list(group)) for _, group in slots]


def _together(group: Sequence[Stretch]) -> Stretch:
    length_s = sum(one.t1_s - one.t0_s for one in group)
    if length_s > 0:
        value = sum(one.value * (one.t1_s - one.t0_s) for one in group) / length_s
    else:
        value = sum(one.value for one in group) / len(group)
    low, high = min(one.low for one in group), max(one.high for one in group)
    return Stretch(group[0].t0_s, group[-1].t1_s, value, low, high)


# --------------------------------------------------------------------------- from spans


def throughput(spans: Iterable[Span], wall_s: float) -> tuple[Point, ...]:
    """Samples per second of one rank while it was stepping, over several steps each: batches may come in bursts."""
    counted = [span for span in spans if span.steps > 0 and span.samples is not None and span.t1_s > span.t0_s]
    rates: list[Stretch] = []
    for together in _without_gaps(counted):
        rates += _rates(together, max(wall_s / POINTS, 1e-9))
    return _as_points(rates)


def _without_gaps(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """The spans, parted where so much lies between two of them that the line of a chart is broken."""
    together: list[Span] = []
    for span in spans:
        if together and span.t0_s - together[-1].t1_s > (span.t1_s - span.t0_s) / 2:
            yield together
            together = []
        together.append(span)
    if together:
        yield together


def _rates(spans: Sequence[Span], width_s: float) -> list[Stretch]:
    """The rates of as many equal parts as have steps enough, each about ``width_s`` long or longer."""
    t0_s, length_s = spans[0].t0_s, max(spans[-1].t1_s - spans[0].t0_s, width_s)
    parts = max(min(sum(span.steps for span in spans) // STEPS_A_RATE, int(length_s / width_s)), 1)
    slots = groupby(spans, key=lambda span: int(((span.t0_s + span.t1_s) / 2 - t0_s) / length_s * parts))
    return [_rate(list(group)) for _, group in slots]


def _rate(spans: Sequence[Span]) -> Stretch:
    rate = sum(span.samples or 0 for span in spans) / sum(span.t1_s - span.t0_s for span in spans)
    return Stretch(spans[0].t0_s, spans[-1].t1_s, rate, rate, rate)


def data_wait(spans: Iterable[Span], wall_s: float) -> tuple[Point, ...]:
    """Seconds of data wait in each step of one rank; the high edge is the longest single wait."""
    waits = ((span, span.buckets.data_wait_s / span.steps) for span in spans if span.steps > 0)
    stretches = [
        Stretch(span.t0_s, span.t1_s, wait_s, wait_s, max(span.data_wait_max_s or wait_s, wait_s))
        for span, wait_s in waits
    ]
    return thin(stretches, wall_s)


def ledger_over_time(spans: Sequence[Span], wall_s: float, bins: int = POINTS) -> dict[str, tuple[float, ...]]:
    """The share of each bucket that occurs, in ``bins`` equal slices of the wall time."""
    if wall_s <= 0:
        return {}
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


def epoch_starts(spans: Iterable[Span]) -> tuple[float, ...]:
    """When each epoch but the first began."""
    return tuple(after.t0_s for before, after in pairwise(spans) if after.epoch > before.epoch)


# --------------------------------------------------------------------------- from samples


@dataclass(frozen=True, slots=True)
class Slot(Generic[Reading]):
    """The readings that become one point of a chart. A reading describes the time since the one before."""

    t0_s: float
    t1_s: float
    readings: Sequence[Reading]


def slots(samples: Sequence[Sample], wall_s: float, points: int = POINTS) -> list[Slot[Sample]]:
    """The samples in at most ``points`` slots, so that they are gone through once for each line and no more."""
    if not samples:
        return []
    moments = [sample.t_s for sample in samples]
    first_s = moments[0] - (moments[1] - moments[0] if len(moments) > 1 else 0.0)
    each = [
        Slot(t0_s, t1_s, (sample,))
        for t0_s, t1_s, sample in zip([max(first_s, 0.0), *moments], moments, samples, strict=False)
    ]
    if len(each) <= points or wall_s <= 0:
        return each
    groups = (list(group) for _, group in groupby(each, key=lambda slot: int(slot.t1_s * points / wall_s)))
    return [Slot(group[0].t0_s, group[-1].t1_s, [slot.readings[0] for slot in group]) for group in groups]


def of_gpu(slots: Iterable[Slot[Sample]], uuid: str) -> list[Slot[GpuReading]]:
    """The same slots with the readings of one GPU."""
    return [
        Slot(slot.t0_s, slot.t1_s, [gpu for sample in slot.readings for gpu in sample.gpus if gpu.uuid == uuid])
        for slot in slots
    ]


def readings(slots: Iterable[Slot[Reading]], figure: Callable[[Reading], float | None]) -> tuple[Point, ...]:
    """One figure over time; where it was not measured there is a gap."""
    points: list[Point] = []
    before: Slot[Reading] | None = None
    for slot in slots:
        values = [value for one in slot.readings if (value := figure(one)) is not None]
        if not values:
            before = None
            continue
        gap = before is None or slot.t0_s - before.t1_s > (slot.t1_s - slot.t0_s) / 2
        points.append(Point((slot.t0_s + slot.t1_s) / 2, fmean(values), min(values), max(values), new_line=gap))
        before = slot
    return tuple(points)


def wall_seconds(run: Run, ledger_wall_s: float) -> float:
    """The length of the time axis: the ledger's wall time, or the last moment that anything was recorded."""
    ends = [spans[-1].t1_s for spans in run.spans if spans] + [sample.t_s for sample in run.samples[-1:]]
    return max([ledger_wall_s, *ends])
