"""The first spans of a run, with warming up told apart from training."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from fulltilt.records import Buckets, Span

WATCHED_AFTER_FIRST = 4
LONGEST_HELD_S = 5.0
WARM_UP_FACTOR = 2.0
WARM_UP_LEAST_S = 0.02
WARMS_UP = ("compute_s", "host_code_s", "data_wait_s", "transfer_s", "sync_s", "communication_s", "unattributed_s")


class WarmUp:
    """Holds the first spans back until it is clear how much of the first step was warming up."""

    def __init__(self) -> None:
        # How much of the first step was none; known once its span was released.
        self.kept: float | None = None
        self._held: list[Span] = []

    def add(self, span: Span) -> list[Span]:
        """Take the next span; returns those that are ready to be written."""
        if self.kept is not None:
            return [span]
        self._held.append(span)
        stepping = [held for held in self._held if held.steps]
        # Steps of many seconds tell it sooner, and whoever is killed among them loses all that is held back.
        enough = len(stepping) > 1 and stepping[-1].t1_s - stepping[0].t1_s > LONGEST_HELD_S
        return self.release() if enough or len(stepping) > WATCHED_AFTER_FIRST else []

    def release(self) -> list[Span]:
        """Everything that was held back. What the first step took beyond the next ones was warming up."""
        held, self._held = self._held, []
        self.kept = 1.0
        for index, span in enumerate(held):
            if span.steps:
                self.kept = kept_of(span, held[index + 1 :])
                held[index : index + 1] = apart(without_warm_up(span, self.kept))
                break
        return held


def kept_of(first: Span, others: list[Span]) -> float:
    """The part of the first span that is training: what it took beyond the median of the next ones was warming up."""
    usual = [first.steps * (span.t1_s - span.t0_s) / span.steps for span in others if span.steps]
    if not usual:
        return 1.0
    took = _could_warm_up_s(first)
    excess = took - median(usual)
    warmed_up = took >= WARM_UP_FACTOR * median(usual) and excess >= WARM_UP_LEAST_S
    return 1.0 - excess / took if warmed_up else 1.0


def without_warm_up(first: Span, kept: float) -> Span:
    """The first span with all but the part that is kept moved to start-up."""
    if kept == 1.0:
        return first
    buckets = first.buckets
    left = {name: getattr(buckets, name) * kept for name in WARMS_UP}
    startup_s = buckets.startup_s + (1.0 - kept) * _could_warm_up_s(first)
    return replace(first, buckets=replace(buckets, startup_s=startup_s, **left), phases=None)


def _could_warm_up_s(span: Span) -> float:
    seconds: float = sum(getattr(span.buckets, name) for name in WARMS_UP)
    return seconds


def apart(span: Span) -> list[Span]:
    """A span's start-up as a span of its own in front of the rest, so that training begins where it began."""
    startup_s = span.buckets.startup_s
    if not 0.0 < startup_s < span.t1_s - span.t0_s:
        return [span]
    boundary_s = span.t0_s + startup_s
    before = Span(span.t0_s, boundary_s, span.first_step, 0, 0, None, Buckets(startup_s=startup_s))
    took_s = span.t1_s - boundary_s
    return [before, replace(span, t0_s=boundary_s, buckets=replace(span.buckets, startup_s=0.0), step_max_s=took_s)]
