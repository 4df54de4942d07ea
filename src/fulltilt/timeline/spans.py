"""From attributed tiles to the lines of steps.jsonl: early steps one by one, later ones together, always closing.

A line covers at least 1/2000 of the time that has passed, so that the file grows with the logarithm of the run: a
million steps take some ten thousand lines, and their buckets still add up to the wall time.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from fulltilt.records import Buckets, Phases, Span

RESOLUTION = 2000
WATCHED_AFTER_FIRST = 4
WARM_UP_FACTOR = 3.0
WARM_UP_LEAST_S = 0.2
WARMS_UP = ("compute_s", "host_code_s", "data_wait_s", "transfer_s", "sync_s", "communication_s", "unattributed_s")


class SpanThinner:
    """Takes one span a step and gives out the spans to be written."""

    def __init__(self) -> None:
        self._held: list[Span] = []
        self._warm = False
        self._group: Span | None = None
        self._written = 0

    def add(self, span: Span) -> list[Span]:
        """Take the next span; returns those that are ready to be written."""
        if self._warm:
            return self._thin([span])
        self._held.append(span)
        return self._settle() if sum(1 for held in self._held if held.steps) > WATCHED_AFTER_FIRST else []

    def flush(self) -> list[Span]:
        """Everything that was held back."""
        ready = [] if self._warm else self._settle()
        if self._group is not None:
            ready.append(self._group)
            self._group = None
        return ready

    def _settle(self) -> list[Span]:
        """The first step is compared with the next ones: what it took beyond them was warming up."""
        self._warm = True
        held, self._held = self._held, []
        for index, span in enumerate(held):
            if span.steps:
                held[index : index + 1] = apart(without_warm_up(span, held[index + 1 :]))
                break
        return self._thin(held)

    def _thin(self, spans: list[Span]) -> list[Span]:
        ready = []
        for span in spans:
            group = span if self._group is None else join(self._group, span)
            if self._written < RESOLUTION or group.t1_s - group.t0_s >= group.t1_s / RESOLUTION:
                ready.append(group)
                self._written += 1
                self._group = None
            else:
                self._group = group
        return ready


def without_warm_up(first: Span, others: list[Span]) -> Span:
    """The first span with what it took beyond the median of the next ones moved to start-up."""
    usual = [span.t1_s - span.t0_s for span in others if span.steps == 1]
    if not usual:
        return first
    buckets = first.buckets
    took = sum(getattr(buckets, name) for name in WARMS_UP)
    excess = took - median(usual)
    if took < WARM_UP_FACTOR * median(usual) or excess < WARM_UP_LEAST_S:
        return first
    kept = 1.0 - excess / took
    moved = {name: getattr(buckets, name) * kept for name in WARMS_UP}
    return replace(first, buckets=replace(buckets, startup_s=buckets.startup_s + excess, **moved), phases=None)


def apart(span: Span) -> list[Span]:
    """A span's start-up as a span of its own in front of the rest, so that training begins where it began."""
    startup_s = span.buckets.startup_s
    if not 0.0 < startup_s < span.t1_s - span.t0_s:
        return [span]
    boundary_s = span.t0_s + startup_s
    before = Span(span.t0_s, boundary_s, span.first_step, 0, 0, None, Buckets(startup_s=startup_s))
    took_s = span.t1_s - boundary_s
    return [before, replace(span, t0_s=boundary_s, buckets=replace(span.buckets, startup_s=0.0), step_max_s=took_s)]


def join(a: Span, b: Span) -> Span:
    """Two neighbouring spans as one."""
    samples = None if a.samples is None and b.samples is None else (a.samples or 0) + (b.samples or 0)
    return Span(
        t0_s=a.t0_s,
        t1_s=b.t1_s,
        first_step=a.first_step if a.steps else b.first_step,
        steps=a.steps + b.steps,
        batches=a.batches + b.batches,
        samples=samples,
        buckets=a.buckets.plus(b.buckets),
        epoch=b.epoch,
        skipped_steps=a.skipped_steps + b.skipped_steps,
        step_max_s=_largest(a.step_max_s, b.step_max_s),
        data_wait_max_s=_largest(a.data_wait_max_s, b.data_wait_max_s),
        phases=_join_phases(a.phases, b.phases),
    )


def _largest(a: float | None, b: float | None) -> float | None:
    return max((value for value in (a, b) if value is not None), default=None)


def _join_phases(a: Phases | None, b: Phases | None) -> Phases | None:
    if a is None or b is None:
        return a or b
    names = ("load_s", "transfer_s", "forward_s", "backward_s", "optimizer_s", "other_s", "gpu_busy_s", "gpu_idle_s")
    joined: dict[str, Any] = {}
    for name in names:
        x, y = getattr(a, name), getattr(b, name)
        joined[name] = None if x is None and y is None else (x or 0.0) + (y or 0.0)
    return Phases(**joined)
