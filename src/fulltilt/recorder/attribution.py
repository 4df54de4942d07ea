"""From an interval's times to the ledger's buckets: the user's own time is split by what stack samples saw. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from fulltilt.recorder.intervals import Interval
from fulltilt.recorder.marks import Activity
from fulltilt.recorder.step_sampling import Usual
from fulltilt.records import BUCKETS, Buckets, Phases

NS = 1e-9
NOTHING: Mapping[str, float] = MappingProxyType({})
# The weights of the stack samples of the user's own time: by what that came after, and by kind.
Seen = Mapping[Activity, Mapping[str, float]]

# What a stack sample of the user's stretch can say, and the bucket that it stands for.
BUCKET_OF_KIND = {
    "torch": "compute_s",
    "host": "host_code_s",
    "data_wait": "data_wait_s",
    "compile": "startup_s",
    "epoch_turnover": "epoch_turnover_s",
    "checkpoint": "checkpoint_s",
    "communication": "communication_s",
}


@dataclass(frozen=True, slots=True)
class Attributed:
    """An interval's time in buckets, its phases, and how much of host_code is the framework's launching (GPU only)."""

    buckets: Buckets
    phases: Phases | None
    launch_s: float


def attribute(
    interval: Interval,
    seen: Seen,
    seen_apart: Seen,
    usual: Usual,
    exposed_communication_s: float = 0.0,
    in_backward: Mapping[str, float] = NOTHING,
) -> Attributed:
    """Split an interval. ``seen`` holds the weights of the stack samples; empty means nothing was seen.

    ``seen_apart`` is the same for what was not spent as in most steps. ``usual`` is how the others divide: time at rest
    is divided the same way, and ``usual`` learns from what is left. ``exposed_communication_s`` is what a step waits
    for the exchange of gradients inside backward. ``in_backward``: how much of that is code of the user's.
    """
    held_up = in_backward.get("host", 0.0) / (sum(in_backward.values()) or 1.0)
    rest_s = interval.times.by_label.get("rest", 0.0) * NS
    all_s = sum(interval.times.by_label.values()) * NS
    exchange_s = exposed_communication_s * interval.steps * (1 - rest_s / all_s if all_s else 1.0)
    apart = _attribute_measured(replace(interval, times=interval.unusual, sync_blocked_ns=0.0), seen_apart, held_up)
    if interval.gpu:
        # Only waits are apart there, and what the GPU's idle time is charged to depends on them.
        measured = _with_exchange(_attribute_measured(interval, seen, held_up), exchange_s)
        usual.learn(_less(measured.buckets, apart.buckets), measured.launch_s)
    else:
        ordinary = replace(interval, times=interval.times.beyond(interval.unusual))
        measured = _attribute_measured(ordinary, seen, held_up)
        compute_s = measured.buckets.compute_s + apart.buckets.compute_s
        share = measured.buckets.compute_s / compute_s if compute_s else 0.0
        measured = _with_exchange(measured, exchange_s * share)
        apart = _with_exchange(apart, exchange_s * (1 - share))
        usual.learn(measured.buckets, measured.launch_s)
    rest = usual.divide(rest_s) if rest_s else {}
    buckets = Buckets(**{name: getattr(measured.buckets, name) + rest.get(name, 0.0) for name in BUCKETS})
    phases = _stretched(measured.phases, interval, rest_s) if rest_s else measured.phases
    if not interval.gpu and interval.unusual.by_label:
        buckets, phases = buckets.plus(apart.buckets), _sum_of(phases, apart.phases)
    return Attributed(buckets, phases, measured.launch_s + rest.get("launch_s", 0.0))


def _less(buckets: Buckets, apart: Buckets) -> Buckets:
    return Buckets(**{name: max(0.0, getattr(buckets, name) - getattr(apart, name)) for name in BUCKETS})


def _stretched(phases: Phases | None, interval: Interval, rest_s: float) -> Phases | None:
    """The measured steps' phases stand for all steps of the interval; None when less than a step was measured."""
    apart_s = 0.0 if interval.gpu else sum(interval.unusual.by_label.values()) * NS
    measured_s = (interval.t1_ns - interval.t0_ns) * NS - rest_s - apart_s
    # A piece of a step (what lies around a rest) does not divide as a step does.
    if measured_s <= 0 or measured_s * interval.steps < measured_s + rest_s or phases is None:
        return None
    factor = 1 + rest_s / measured_s
    stretched: dict[str, Any] = {}
    for item in fields(Phases):
        value = getattr(phases, item.name)
        stretched[item.name] = None if value is None else value * factor
    return Phases(**stretched)


def _sum_of(phases: Phases | None, more: Phases | None) -> Phases | None:
    if phases is None or more is None:
        return None
    summed: dict[str, Any] = {}
    for item in fields(Phases):
        one, other = getattr(phases, item.name), getattr(more, item.name)
        summed[item.name] = None if one is None else one + (other or 0.0)
    return Phases(**summed)


def _attribute_measured(interval: Interval, seen: Seen, held_up: float) -> Attributed:
    split = _split(seen, interval.times.user_after)
    return _attribute_gpu(interval, split) if interval.gpu else _attribute_cpu(interval, split, held_up)


def _split(seen: Seen, user_after: Mapping[Activity, float]) -> dict[str, float]:
    """How the user's own time divides. How much of it came after what is measured; only the rest is left to samples.

    A sample that comes late, because the interpreter lock was held, is lost from a short stretch before another
    activity, but its time is not.
    """
    everywhere: dict[str, float] = {}
    for kinds in seen.values():
        for kind, weight in kinds.items():
            everywhere[kind] = everywhere.get(kind, 0.0) + weight
    if not sum(everywhere.values()):
        return {}
    known = {after: ns for after, ns in user_after.items() if ns > 0} or {Activity.USER: 1.0}
    split: dict[str, float] = {}
    for after, ns in known.items():
        kinds = seen.get(after, {})
        if not sum(kinds.values()):
            kinds = everywhere
        scale = ns / sum(known.values()) / sum(kinds.values())
        for kind, weight in kinds.items():
            split[kind] = split.get(kind, 0.0) + scale * weight
    return split


def _with_exchange(whole: Attributed, exchange_s: float) -> Attributed:
    """What backward waited for the exchange of gradients was booked as compute."""
    exchanged = min(exchange_s, whole.buckets.compute_s)
    if exchanged <= 0:
        return whole
    buckets = replace(
        whole.buckets,
        compute_s=whole.buckets.compute_s - exchanged,
        communication_s=whole.buckets.communication_s + exchanged,
    )
    return replace(whole, buckets=buckets)


def _attribute_cpu(interval: Interval, split: Mapping[str, float], held_up: float) -> Attributed:
    ns = interval.times.by_label
    user, backward = ns.get("user", 0.0), ns.get("backward", 0.0)
    out = _common(ns)
    out["compute_s"] += backward * (1 - held_up) + ns.get("optimizer", 0.0)
    out["host_code_s"] += backward * held_up
    for kind, share in split.items():
        out[_bucket_of(kind, interval)] += user * share
    if not split:
        out["unattributed_s"] += user
    return Attributed(_in_seconds(out), _phases(interval, split, gpu=False), launch_s=0.0)


def _attribute_gpu(interval: Interval, split: Mapping[str, float]) -> Attributed:
    ns = interval.times.by_label
    out = _common(ns)
    out["compute_s"] += ns.get("busy", 0.0)
    # Time booked before the first event (there was no GPU clock yet) is host time.
    out["compute_s"] += (
        ns.get("backward", 0.0) + ns.get("optimizer", 0.0) + ns.get("user", 0.0) * split.get("torch", 0.0)
    )
    user_overlap = interval.times.phases.get("starved_user", 0.0)
    launch = ns.get("starved", 0.0)
    for kind, share in split.items():
        if kind == "torch":
            continue
        booked = min(launch, user_overlap * share)
        out[_bucket_of(kind, interval)] += booked + ns.get("user", 0.0) * share
        launch -= booked
    # Where the host has waited for the GPU it has lost its lead: what it did next, the GPU had to wait for. A step
    # takes what the host does plus what it is blocked; unblocked it would take the longer of host and GPU. So the wait
    # costs as much as it lasts, but no more than the GPU idles.
    owed = interval.sync_blocked_ns
    sync = min(launch, owed)
    launch -= sync
    for bucket in ("host_code_s", "data_wait_s"):
        taken = min(out[bucket], owed - sync)
        out[bucket] -= taken
        sync += taken
    out["sync_s"] += sync
    if not split:
        out["unattributed_s"] += launch + ns.get("user", 0.0)
        launch = 0.0
    out["host_code_s"] += launch
    return Attributed(_in_seconds(out), _phases(interval, split, gpu=True), launch * NS)


def _bucket_of(kind: str, interval: Interval) -> str:
    # Workers that end after the last step are part of the tear-down, which is booked with the start-up.
    return "startup_s" if kind == "epoch_turnover" and not interval.steps else BUCKET_OF_KIND[kind]


def _common(ns: Mapping[str, float]) -> dict[str, float]:
    return {
        "startup_s": ns.get("startup", 0.0),
        "data_wait_s": ns.get("data_wait", 0.0),
        "transfer_s": ns.get("transfer", 0.0),
        "compute_s": 0.0,
        "sync_s": ns.get("sync", 0.0),
        "host_code_s": 0.0,
        "validation_s": ns.get("validation", 0.0),
        "checkpoint_s": ns.get("checkpoint", 0.0),
        "epoch_turnover_s": ns.get("epoch_turnover", 0.0),
        "communication_s": ns.get("communication", 0.0),
        "unattributed_s": ns.get("observer", 0.0),
    }


def _in_seconds(out: Mapping[str, float]) -> Buckets:
    return Buckets(**{name: ns * NS for name, ns in out.items()})


def _phases(interval: Interval, split: Mapping[str, float], *, gpu: bool) -> Phases:
    phase, spent = interval.times.phases, interval.times.by_label
    user = phase.get("user", 0.0)
    forward = user * split.get("torch", 0.0)
    busy = spent.get("busy", 0.0)
    idle = max(0.0, interval.t1_ns - interval.t0_ns - busy - spent.get("rest", 0.0))
    return Phases(
        load_s=phase.get("data_wait", 0.0) * NS,
        transfer_s=phase.get("transfer", 0.0) * NS,
        forward_s=forward * NS,
        backward_s=phase.get("backward", 0.0) * NS,
        optimizer_s=phase.get("optimizer", 0.0) * NS,
        other_s=(phase.get("other", 0.0) + user - forward) * NS,
        gpu_busy_s=busy * NS if gpu else None,
        gpu_idle_s=idle * NS if gpu else None,
    )
