"""From intervals to the spans of a run folder: the user's own time divided, warming up told apart from training."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from fulltilt.recorder.attribution import attribute
from fulltilt.recorder.intervals import Interval
from fulltilt.recorder.rank_state import RankState
from fulltilt.recorder.stacks.stack_sampler import StackSampler
from fulltilt.recorder.step_sampling import Usual
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


NS = 1e-9


class Booking:
    """Books intervals in order; the first spans are held back until warming up is told apart."""

    def __init__(self, t0_ns: int, state: RankState, sampler: StackSampler) -> None:
        self._t0_ns = t0_ns
        self._state = state
        self._sampler = sampler
        self._usual = Usual()
        self._warm_up = WarmUp()
        self._ready: list[Span] = []
        # Of the first step, until it is known how much of it was warming up: launching, and the GPU's work.
        self._first: tuple[float, float] | None = None

    def book(self, intervals: list[Interval]) -> None:
        """Make spans of these intervals, which are taken out of the list."""
        if not intervals:
            return
        state = self._state
        seen, seen_apart = self._sampler.splits()
        in_backward = self._sampler.backward.split()
        exposed_s = state.exposed_communication_s()
        for interval in intervals:
            # What follows the last step is no step: it divides as what takes long.
            here = seen if interval.steps else seen_apart
            attributed = attribute(interval, here, seen_apart, self._usual, exposed_s, in_backward)
            state.launch_s += attributed.launch_s
            busy_s = attributed.buckets.compute_s if interval.gpu and interval.steps else 0.0
            state.gpu_busy_s += busy_s
            state.gpu_steps += interval.steps if interval.gpu else 0
            if interval.steps and not state.steps_attributed:
                self._first = attributed.launch_s, busy_s
            span = Span(
                t0_s=self._since_start_s(interval.t0_ns),
                t1_s=self._since_start_s(interval.t1_ns),
                first_step=state.steps_attributed,
                steps=interval.steps,
                batches=interval.batches,
                samples=interval.samples,
                buckets=attributed.buckets,
                epoch=interval.epoch,
                skipped_steps=interval.skipped,
                step_max_s=interval.step_max_ns * NS if interval.steps else None,
                data_wait_max_s=interval.data_wait_max_ns * NS,
                phases=attributed.phases if interval.steps else None,
            )
            state.steps_attributed += interval.steps
            self._ready.extend(self._warm_up.add(span))
        self._leave_out_warm_up()
        intervals.clear()
        self._sampler.begin_window()

    def take(self, final: bool) -> list[Span]:
        """The spans that can be written now; with ``final`` all there are."""
        if final:
            self._ready.extend(self._warm_up.release())
            self._leave_out_warm_up()
        ready, self._ready = self._ready, []
        return ready

    def under_way(self, interval: Interval, steps: int) -> Span:
        """The step under way, behind ``steps`` others: all that is known of it if the job is killed."""
        _, seen_apart = self._sampler.splits()
        buckets = attribute(interval, seen_apart, seen_apart, Usual(), 0.0, self._sampler.backward.split()).buckets
        t0_s, t1_s = self._since_start_s(interval.t0_ns), self._since_start_s(interval.t1_ns)
        return Span(t0_s, t1_s, steps, 0, 0, None, buckets, interval.epoch)

    def _leave_out_warm_up(self) -> None:
        """What was warming up is neither launching nor work that the next steps have, too."""
        kept = self._warm_up.kept
        if kept is None or self._first is None:
            return
        launch_s, busy_s = self._first
        self._first = None
        self._state.launch_s -= (1 - kept) * launch_s
        self._state.gpu_busy_s -= (1 - kept) * busy_s

    def _since_start_s(self, t_ns: float) -> float:
        return (t_ns - self._t0_ns) * NS
