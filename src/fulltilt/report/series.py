"""What happened over time, thinned for drawing: a run of a million steps fits into the same few points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
class Slot(Generic[Reading]):
    """What becomes one point of a chart. A reading describes the time since the one before."""

    t0_s: float
    t1_s: float
    readings: Sequence[Reading]


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a line: the mean over a stretch of time and its extremes. ``new_line``: there is a gap before it."""

    t_s: float
    value: float
    low: float
    high: float
    new_line: bool = False


def _grouped(each: Iterable[Slot[Reading]], wall_s: float, points: int) -> list[Slot[Reading]]:
    """The slots that end in the same of ``points`` equal parts of the wall time as one."""

    def part(slot: Slot[Reading]) -> int:
        return min(int(slot.t1_s * points / wall_s), points - 1)

    groups = (list(group) for _, group in groupby(each, key=part))
    return [Slot(group[0].t0_s, group[-1].t1_s, [slot.readings[0] for slot in group]) for group in groups]


def _line(
    slots: Iterable[Slot[Reading]], figures: Callable[[Sequence[Reading]], tuple[float, float, float] | None]
) -> tuple[Point, ...]:
    """One point a slot from its mean, minimum and maximum; where there are none the line has a gap."""
    points: list[Point] = []
    before: Slot[Reading] | None = None
    for slot in slots:
        known = figures(slot.readings)
        if known is None:
            before = None
            continue
        # Half a slot of slack: clocks are rounded when they are stored.
        gap = before is None or slot.t0_s - before.t1_s > (slot.t1_s - slot.t0_s) / 2
        points.append(Point((slot.t0_s + slot.t1_s) / 2, *known, new_line=gap))
        before = slot
    return tuple(points)


# --------------------------------------------------------------------------- from spans


def throughput(spans: Iterable[Span], wall_s: float) -> tuple[Point, ...]:
    """Samples per second of one rank while it was stepping, over several steps each: batches may come in bursts."""
    counted = [span for span in spans if span.steps > 0 and span.samples is not None and span.t1_s > span.t0_s]
    rates = sum(span.steps for span in counted) / STEPS_A_RATE
    rate_s = sum(span.t1_s - span.t0_s for span in counted) / max(rates, 1.0)
    points = max(min(int(wall_s / rate_s), POINTS), 1) if counted else 1

    def rate(together: Sequence[Span]) -> tuple[float, float, float]:
        samples = sum(span.samples or 0 for span in together)
        return (samples / sum(span.t1_s - span.t0_s for span in together),) * 3

    return _line(_grouped((Slot(span.t0_s, span.t1_s, (span,)) for span in counted), wall_s, points), rate)


def data_wait(spans: Iterable[Span], wall_s: float) -> tuple[Point, ...]:
    """Seconds of data wait in each step of one rank; the high edge is the longest single wait."""

    def wait(together: Sequence[Span]) -> tuple[float, float, float]:
        each = [span.buckets.data_wait_s / span.steps for span in together]
        mean_s = sum(span.buckets.data_wait_s for span in together) / sum(span.steps for span in together)
        return mean_s, min(each), max([*each, *(span.data_wait_max_s or 0.0 for span in together)])

    stepping = (Slot(span.t0_s, span.t1_s, (span,)) for span in spans if span.steps > 0)
    return _line(_grouped(stepping, wall_s, POINTS), wait)


def ledger_over_time(spans: Sequence[Span], wall_s: float, bins: int = POINTS) -> dict[str, tuple[float, ...]]:
    """The share of each bucket that occurs, in ``bins`` equal slices of the wall time."""
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


def of_first_machine(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Of a job over several machines the samples of the first: those of each follow one another, from its start on."""
    later = (place for place in range(1, len(samples)) if samples[place].t_s < samples[place - 1].t_s)
    return samples[: next(later, len(samples))]


def slots(samples: Sequence[Sample], wall_s: float, points: int = POINTS) -> list[Slot[Sample]]:
    """The samples in at most ``points`` slots, so that they are gone through once for each line and no more."""
    moments = [sample.t_s for sample in samples]
    first_s = 2 * moments[0] - moments[1] if len(moments) > 1 else sum(moments)
    each = [
        Slot(t0_s, t1_s, (sample,))
        for t0_s, t1_s, sample in zip([max(first_s, 0.0), *moments], moments, samples, strict=False)
    ]
    return each if len(each) <= points else _grouped(each, wall_s, points)


def of_gpu(slots: Iterable[Slot[Sample]], uuid: str) -> list[Slot[GpuReading]]:
    """The same slots with the readings of one GPU."""
    return [
        Slot(slot.t0_s, slot.t1_s, [gpu for sample in slot.readings for gpu in sample.gpus if gpu.uuid == uuid])
        for slot in slots
    ]


def readings(slots: Iterable[Slot[Reading]], figure: Callable[[Reading], float | None]) -> tuple[Point, ...]:
    """One figure over time; where it was not measured there is a gap."""

    def spread(together: Sequence[Reading]) -> tuple[float, float, float] | None:
        values = [value for one in together if (value := figure(one)) is not None]
        return (fmean(values), min(values), max(values)) if values else None

    return _line(slots, spread)


def wall_seconds(run: Run, ledger_wall_s: float) -> float:
    """The length of the time axis: the ledger's wall time, or the moment of the last sample."""
    return max([ledger_wall_s, *(sample.t_s for sample in run.samples[-1:])])
