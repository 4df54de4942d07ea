"""From intervals to the spans of a run folder: which bucket time goes into, and how much of the first step was warm-up.

The user's own time is split by what stack samples saw in it. Steps that were only counted divide as the measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any

from fulltilt.recorder.intervals import Interval
from fulltilt.recorder.marks import Activity, Totals
from fulltilt.recorder.rank_state import RankState
from fulltilt.recorder.stack_sampler import StackSampler
from fulltilt.recorder.steps import LONG_STEP_NS
from fulltilt.records import BUCKETS, Buckets, Phases, Span

NS = 1e-9
# The weights of the stack samples of the user's own time, by the activity before it and by kind.
Seen = Mapping[Activity, Totals[str]]

# The bucket of each kind of stack sample.
BUCKET_OF_KIND = {
    "torch": "compute_s",
    "host": "host_code_s",
    "data_wait": "data_wait_s",
    "compile": "startup_s",
    "import": "startup_s",
    "epoch_turnover": "epoch_turnover_s",
    "checkpoint": "checkpoint_s",
    "communication": "communication_s",
}
# The buckets of an ordinary step: the time of a pause is divided among them, and warm-up can have prolonged them.
ORDINARY = ("data_wait_s", "transfer_s", "compute_s", "sync_s", "host_code_s", "communication_s", "unattributed_s")
FORGET = 0.98


@dataclass(frozen=True, slots=True)
class Attributed:
    """An interval's time in buckets, its phases, and how much of host_code is the framework's launching (GPU only)."""

    buckets: Buckets
    phases: Phases | None
    launch_s: float
    long: Buckets = field(default_factory=Buckets)  # of the buckets, stretches of the user's own too long for launching


@dataclass
class Usual:
    """How measured time has divided lately, with the share of launching in it."""

    seconds: Totals[str] = field(default_factory=Totals)
    steps: float = 0.0

    def learn(self, interval: Interval, measured: Attributed) -> None:
        """Learn from measured time, without long waits and long steps: in a pause those are booked as they are."""
        took_long = interval.step_max_ns > LONG_STEP_NS or "user" in interval.in_pause_ns
        if took_long and not interval.gpu:
            return
        waits_s = (interval.long_waits_ns + interval.in_pause_ns["data_wait"]) * NS
        observer_s = interval.times.by_label["observer"] * NS  # measuring more closely than usual, which no pause holds
        long = measured.long.plus(Buckets(data_wait_s=waits_s, unattributed_s=observer_s))
        now = {name: max(0.0, getattr(measured.buckets, name) - getattr(long, name)) for name in ORDINARY}
        for name, seconds in (*now.items(), ("launch_s", measured.launch_s)):
            self.seconds[name] = FORGET * self.seconds[name] + seconds
        self.steps = FORGET * self.steps + interval.steps - interval.counted_steps

    @property
    def launch_share(self) -> float:
        """How much of that time the GPU waits for kernels to be launched."""
        return self.seconds["launch_s"] / (self._total_s or 1.0)

    @property
    def _total_s(self) -> float:
        return sum(self.seconds[name] for name in ORDINARY)

    def divide(self, paused_s: float) -> Totals[str]:
        """``paused_s`` by bucket, and how much of it was launching (``launch_s``, a part of host_code_s)."""
        if not self._total_s:
            return Totals(unattributed_s=paused_s)
        return Totals({name: paused_s * seconds / self._total_s for name, seconds in self.seconds.items()})


def attribute(
    interval: Interval,
    seen: Seen,
    usual: Usual,
    exposed_communication_s: float = 0.0,
    held_up: float = 0.0,
) -> Attributed:
    """Split an interval. ``seen`` holds the weights of the stack samples; empty means nothing was seen.

    The time of pauses is divided as in ``usual``, which learns from what was measured. ``exposed_communication_s`` is
    what a step waits for the exchange of gradients inside backward. ``held_up``: the share of user code in backward.
    """
    paused_s = interval.times.by_label["paused"] * NS
    all_s = sum(interval.times.by_label.values()) * NS
    split = _split(seen, interval.times.user_after)
    if interval.gpu:
        measured = _attribute_gpu(interval, split, seen.get(Activity.LONG_USER, Totals()))
    else:
        measured = _attribute_cpu(interval, split, held_up)
    # What backward waited for the exchange of gradients was booked as compute.
    exchange_s = exposed_communication_s * interval.steps * (1 - paused_s / all_s if all_s else 1.0)
    exchange_s = min(exchange_s, measured.buckets.compute_s)
    if exchange_s > 0:
        moved = Buckets(compute_s=-exchange_s, communication_s=exchange_s)
        measured = replace(measured, buckets=measured.buckets.plus(moved))
    usual.learn(interval, measured)
    if not paused_s:
        return measured
    shares = usual.divide(paused_s)
    buckets = Buckets(**{name: getattr(measured.buckets, name) + shares[name] for name in BUCKETS})
    if interval.gpu and usual.steps:
        # A long step in a pause cost the GPU less where it still had queued work meanwhile.
        queue_s = usual.seconds["compute_s"] / usual.steps * interval.counted_steps - shares["compute_s"]
        hidden_s = min(max(queue_s, 0.0), interval.in_pause_ns["user"] * NS, buckets.host_code_s)
        buckets = buckets.plus(Buckets(compute_s=hidden_s, host_code_s=-hidden_s))
    return Attributed(buckets, _stretched(measured.phases, interval, paused_s), measured.launch_s + shares["launch_s"])


def _stretched(phases: Phases | None, interval: Interval, paused_s: float) -> Phases | None:
    """The phases of all steps of the interval, by the measured ones; None when less than a step was measured."""
    if phases is None:
        return None
    # What was booked in a pause is not repeated in other steps.
    waited_s, worked_s = interval.in_pause_ns["data_wait"] * NS, interval.in_pause_ns["user"] * NS
    booked_s = sum(interval.in_pause_ns.values()) * NS
    once: Totals[str] = Totals(load_s=waited_s, other_s=min(worked_s, phases.other_s))
    once["gpu_idle_s"] = min(booked_s, phases.gpu_idle_s or 0.0)
    measured_s = (interval.t1_ns - interval.t0_ns) * NS - paused_s - booked_s
    # A piece of a step (just before or after a pause) does not divide as a step does.
    if measured_s <= 0 or measured_s * interval.steps < measured_s + paused_s:
        return None
    factor = 1 + paused_s / measured_s
    stretched: dict[str, Any] = {}
    for item in fields(Phases):
        value, apart_s = getattr(phases, item.name), once[item.name]
        stretched[item.name] = None if value is None else (value - apart_s) * factor + apart_s
    return Phases(**stretched)


def _split(seen: Seen, user_after: Mapping[Activity, float]) -> Totals[str]:
    """How the user's own time divides by kind. How much of it came after each activity is measured, not sampled.

    A short stretch before another activity may lose its sample, which comes late where the interpreter lock is held,
    but not its time.
    """
    split: Totals[str] = Totals()
    everywhere: Totals[str] = Totals()
    for after, kinds in seen.items():
        for kind, weight in kinds.items() if after is not Activity.LONG_USER else ():
            everywhere[kind] += weight
    if not sum(everywhere.values()):
        return split
    known = {after: ns for after, ns in user_after.items() if ns > 0} or {Activity.USER: 1.0}
    for after, ns in known.items():
        kinds = seen.get(after, Totals[str]())
        if not sum(kinds.values()):
            # A forward pass of a millisecond holds the interpreter lock to its end: no sample sees it.
            kinds = Totals(torch=1.0) if after is Activity.DATA_WAIT else everywhere
        scale = ns / sum(known.values()) / sum(kinds.values())
        for kind, weight in kinds.items():
            split[kind] += scale * weight
    return split


def _attribute_cpu(interval: Interval, split: Totals[str], held_up: float) -> Attributed:
    ns = interval.times.by_label
    user, backward = ns["user"], ns["backward"]
    out = _common(ns)
    out["compute_s"] += backward * (1 - held_up) + ns["optimizer"]
    out["host_code_s"] += backward * held_up
    for kind, share in split.items():
        out[_bucket_of(kind, interval)] += user * share
    if not split:
        out["unattributed_s"] += user
    return Attributed(_in_seconds(out), _phases(interval, split), launch_s=0.0)


def _attribute_gpu(interval: Interval, split: Totals[str], seen_long: Totals[str]) -> Attributed:
    ns = interval.times.by_label
    out = _common(ns)
    long = dict.fromkeys(BUCKETS, 0.0)
    if not sum(seen_long.values()):
        seen_long = Totals(host=1.0)
    for kind, weight in seen_long.items():
        long[_bucket_of(kind, interval)] += ns["long_user"] * weight / sum(seen_long.values())
    out = {name: out[name] + long[name] for name in BUCKETS}
    out["compute_s"] += ns["gpu_busy"]
    # Time booked before the first event (there was no GPU clock yet) is host time.
    out["compute_s"] += ns["backward"] + ns["optimizer"] + ns["user"] * split["torch"]
    user_overlap = interval.times.phases["launching_user"]
    launch = ns["launching"]
    for kind, share in split.items():
        if kind == "torch":
            continue
        booked = min(launch, user_overlap * share)
        out[_bucket_of(kind, interval)] += booked + ns["user"] * share
        launch -= booked
    # A host that has waited for the GPU has lost its lead, and the GPU waits for what it does next. A step takes the
    # host's work plus the wait; without the wait it would take the longer of host and GPU. So the wait costs as much as
    # it lasts, but no more than the GPU idles.
    owed = interval.sync_blocked_ns
    sync = min(launch, owed)
    launch -= sync
    for bucket in ("host_code_s", "data_wait_s"):
        taken = min(out[bucket], owed - sync)
        out[bucket] -= taken
        sync += taken
    out["sync_s"] += sync
    if not split:
        out["unattributed_s"] += launch + ns["user"]
        launch = 0.0
    out["host_code_s"] += launch
    return Attributed(_in_seconds(out), _phases(interval, split), launch * NS, _in_seconds(long))


def _bucket_of(kind: str, interval: Interval) -> str:
    # Workers that end after the last step are part of the tear-down, which is booked with the start-up.
    return "startup_s" if kind == "epoch_turnover" and not interval.steps else BUCKET_OF_KIND[kind]


def _common(ns: Totals[str]) -> dict[str, float]:
    out = {name: ns[name.removesuffix("_s")] for name in BUCKETS}
    out["unattributed_s"] = ns["observer"]
    return out


def _in_seconds(out: Mapping[str, float]) -> Buckets:
    return Buckets(**{name: ns * NS for name, ns in out.items()})


def _phases(interval: Interval, split: Totals[str]) -> Phases:
    phase, spent = interval.times.phases, interval.times.by_label
    user = phase["user"]
    forward, waited = user * split["torch"], user * split["data_wait"]
    busy = spent["gpu_busy"]
    idle = max(0.0, interval.t1_ns - interval.t0_ns - busy - spent["paused"])
    return Phases(
        load_s=(phase["data_wait"] + waited) * NS,
        transfer_s=phase["transfer"] * NS,
        forward_s=forward * NS,
        backward_s=phase["backward"] * NS,
        optimizer_s=phase["optimizer"] * NS,
        other_s=(phase["other"] + user - forward - waited) * NS,
        gpu_busy_s=busy * NS if interval.gpu else None,
        gpu_idle_s=idle * NS if interval.gpu else None,
    )


# --------------------------------------------------------------------------- warm-up

WATCHED_AFTER_FIRST = 4
LONGEST_HELD_S = 5.0
WARM_UP_FACTOR = 2.0
WARM_UP_LEAST_S = 0.02


def _without_startup(first: Span, kept: float, took_s: float) -> list[Span]:
    """The first span with only the part that is kept, after a span of start-up with the rest."""
    startup_s = first.buckets.startup_s + (1.0 - kept) * took_s
    left = {name: getattr(first.buckets, name) * kept for name in ORDINARY}
    if not 0.0 < startup_s < first.t1_s - first.t0_s:
        return [replace(first, buckets=replace(first.buckets, startup_s=startup_s, **left))]
    boundary_s = first.t0_s + startup_s
    before = Span(first.t0_s, boundary_s, first.first_step, 0, 0, None, Buckets(startup_s=startup_s))
    trained = replace(
        first,
        t0_s=boundary_s,
        buckets=replace(first.buckets, startup_s=0.0, **left),
        phases=first.phases if kept == 1.0 else None,
    )
    return [before, trained]


# --------------------------------------------------------------------------- spans


class SpanBuilder:
    """Makes spans of intervals in order; the first ones are held back until warm-up is known."""

    def __init__(self, t0_ns: int, state: RankState, sampler: StackSampler) -> None:
        self._t0_ns = t0_ns
        self._state = state
        self._sampler = sampler
        self.usual = Usual()
        self._held: list[Span] = []
        self._warm_up_is_known = False
        self._ready: list[Span] = []
        self._first = (0.0, 0.0)  # launching and GPU work of the first step

    def add(self, intervals: list[Interval]) -> None:
        """Make spans of these intervals, which are taken out of the list."""
        if not intervals:
            return
        state, seen, held_up = self._state, self._sampler.split(), self._sampler.backward_held_up
        exposed_s = state.exposed_communication_s()
        for interval in intervals:
            attributed = attribute(interval, seen, self.usual, exposed_s, held_up)
            busy_s = attributed.buckets.compute_s if interval.gpu and interval.steps else 0.0
            state.launch_s += attributed.launch_s
            state.gpu_busy_s += busy_s
            state.gpu_steps += interval.steps if interval.gpu else 0
            if interval.steps and not state.steps_attributed:
                self._first = attributed.launch_s, busy_s
            span = Span(
                t0_s=(interval.t0_ns - self._t0_ns) * NS,
                t1_s=(interval.t1_ns - self._t0_ns) * NS,
                first_step=state.steps_attributed,
                steps=interval.steps,
                batches=interval.batches,
                samples=interval.samples,
                buckets=attributed.buckets,
                epoch=interval.epoch,
                skipped_steps=interval.skipped,
                phases=attributed.phases if interval.steps else None,
            )
            state.steps_attributed += interval.steps
            self._held.append(span)
            if self._warm_up_is_known or self._shows_warm_up():
                self._release()
        intervals.clear()
        self._sampler.begin_window()

    def take(self, final: bool) -> list[Span]:
        """The spans that can be written now; with ``final`` all there are."""
        if final:
            self._release()
        ready, self._ready = self._ready, []
        return ready

    def _shows_warm_up(self) -> bool:
        stepping = [held for held in self._held if held.steps]
        # With steps of many seconds fewer are enough: a job that is killed loses the spans that are held back.
        enough = len(stepping) > 1 and stepping[-1].t1_s - stepping[0].t1_s > LONGEST_HELD_S
        return enough or len(stepping) > WATCHED_AFTER_FIRST

    def _release(self) -> None:
        """Let go of what was held back. What the first step took beyond the median of the next ones was warm-up."""
        held, self._held = self._held, []
        stepping = [span for span in held if span.steps]
        if stepping and not self._warm_up_is_known:
            first = stepping[0]
            took_s = sum(getattr(first.buckets, name) for name in ORDINARY)
            next_ones = [first.steps * (later.t1_s - later.t0_s) / later.steps for later in stepping[1:]]
            usual_s = median(next_ones) if next_ones else took_s
            warms_up = took_s >= WARM_UP_FACTOR * usual_s and took_s - usual_s >= WARM_UP_LEAST_S
            kept = usual_s / took_s if warms_up else 1.0
            place = held.index(first)
            held[place : place + 1] = _without_startup(first, kept, took_s)
            launch_s, busy_s = self._first
            self._state.launch_s -= (1 - kept) * launch_s
            self._state.gpu_busy_s -= (1 - kept) * busy_s
        self._warm_up_is_known = True
        self._ready += held

    def under_way(self, interval: Interval, steps: int) -> Span:
        """A span of the step under way, after ``steps`` others, in case the job is killed in it."""
        seen, held_up = self._sampler.split(under_way=True), self._sampler.backward_held_up
        buckets = attribute(interval, seen, Usual(), 0.0, held_up).buckets
        t0_s, t1_s = (interval.t0_ns - self._t0_ns) * NS, (interval.t1_ns - self._t0_ns) * NS
        return Span(t0_s, t1_s, steps, 0, 0, None, buckets, interval.epoch)
