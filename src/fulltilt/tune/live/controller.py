"""Which settings to try next while a job trains: a pure function of what was seen so far.

Workers come first, by the scaling law over all that was seen. Real loaders have sharper peaks than the law (CLIP on 16
cores: 1050, 1489 and 712 samples/s with 8, 12 and 16 workers), so the gaps beside the best are halved next; then comes
the depth of the queue. A try that does not pay is taken back by whoever called: the best so far is always in force.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fulltilt.tune.live.limits import DEFAULT, Limits
from fulltilt.tune.live.room import Room, most_workers
from fulltilt.tune.live.window import Knobs, Seen
from fulltilt.tune.scaling import Estimate, Measured, ScalingLaw, fit_scaling

# One worker does what the training thread did, give or take handing the batch over.
SERIAL_SPREAD = 0.2


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a decision depends on. ``seen`` is in order, the start first; ``failed`` are settings that broke."""

    in_force: Knobs
    seen: tuple[Seen, ...]
    room: Room
    failed: tuple[Knobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Try:
    """Start a pool with these settings. ``expected`` is the range of batches a second that it should give."""

    knobs: Knobs
    expected: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Settle:
    """Stay with what is in force; ``why`` is for the user."""

    why: str


def decide(situation: Situation, limits: Limits = DEFAULT) -> Try | Settle:
    """The next move. Every situation ends in Settle after a few of them."""
    best = best_of(situation.seen)
    if best.wait_share <= limits.enough_wait_share:
        return Settle("the loader is no longer the limit")
    if len(situation.seen) - 1 + len(situation.failed) >= limits.most_moves:
        return Settle(f"{limits.most_moves} settings were tried")
    most, what = most_workers(situation.room, best.knobs.prefetch, limits)
    untried = _untried(situation, most, limits)
    law, ceiling = law_of(situation), ceiling_of(situation.seen)
    rates = {workers: law.at(workers) for workers in untried}
    workers = _by_the_law(rates, ceiling, best, limits) or _between(situation, rates, best, limits)
    if workers is not None:
        knobs = Knobs(workers, best.knobs.prefetch, best.knobs.pin or situation.room.can_pin, True)
        return Try(knobs, (min(rates[workers].low, ceiling), min(rates[workers].high, ceiling)))
    deeper = _deeper_queue(situation, best, limits)
    if deeper is not None:
        return Try(deeper, (best.batches_per_s, ceiling))
    limit = "" if untried else f"; there is room for {most} workers ({what})"
    return Settle(f"no other setting promises more{limit}")


def best_of(seen: tuple[Seen, ...]) -> Seen:
    """The fastest of what was seen."""
    return max(seen, key=lambda one: one.batches_per_s)


def pays(before: Seen, after: Seen, limits: Limits = DEFAULT) -> bool:
    """Whether a change is worth keeping: clearly faster, or as fast with fewer workers."""
    fewer = 0 < after.knobs.workers < before.knobs.workers
    return after.batches_per_s > before.batches_per_s * (1.0 if fewer else 1 + limits.paid_share)


def ceiling_of(seen: tuple[Seen, ...]) -> float:
    """Batches a second that training could take if it never waited."""
    return 1 / max(min(one.busy_s for one in seen), 1e-9)


def law_of(situation: Situation) -> ScalingLaw:
    """The scaling law behind what was seen; the rate without workers stands for that of one."""
    points = []
    for one in situation.seen:
        if one.knobs.workers:
            points.append(Measured(one.knobs.workers, one.batches_per_s, one.spread))
        else:
            fetch_s = one.wait_share / one.batches_per_s
            points.append(Measured(1, 1 / fetch_s, SERIAL_SPREAD))
    room = situation.room
    return fit_scaling(points, expected_peak=max(0.75 * room.cpus / room.ranks / (room.cpu_share or 1.0), 1.0))


def _untried(situation: Situation, most: int, limits: Limits) -> list[int]:
    """Numbers of workers that there is room for and that are no leap into the dark."""
    known = [one.knobs.workers for one in situation.seen if one.knobs.workers]
    tried = {*known, *(knobs.workers for knobs in situation.failed)}
    if situation.seen[0].knobs.workers:
        low, high = min(known) / limits.leap, max(known) * limits.leap
    else:
        low, high = 1, most  # what one batch costs is known exactly, so a leap upward is no guess
    return [workers for workers in range(1, most + 1) if low <= workers <= high and workers not in tried]


def _by_the_law(rates: Mapping[int, Estimate], ceiling: float, best: Seen, limits: Limits) -> int | None:
    """The number of workers that should be fastest, and the fewest of those that would be fast enough."""
    worth = best.batches_per_s * (1 + limits.worth_share)
    promising = {
        workers: min(rate.rate / limits.worker_headroom, ceiling)
        for workers, rate in rates.items()
        if min(rate.high, ceiling) >= worth
    }
    top = max(promising.values(), default=0.0)
    return min((workers for workers, rate in promising.items() if rate >= 0.99 * top), default=None)


def _between(situation: Situation, rates: Mapping[int, Estimate], best: Seen, limits: Limits) -> int | None:
    """The middle of the gap between the best and what was tried next to it, as long as a gap is wide."""
    here = max(best.knobs.workers, 0.5)  # the training thread alone lies below one worker
    tried = {one.knobs.workers for one in situation.seen}
    end = min(limits.leap * here, max(rates, default=here) + 1)
    above = min((workers for workers in tried if workers > here), default=end)
    below = max((workers for workers in tried if 0 < workers < here), default=here / limits.leap)
    gaps = [(above / here, math.sqrt(above * here)), (here / below, math.sqrt(here * below))]
    for width, middle in sorted(gaps, reverse=True):
        rate = rates.get(round(middle))
        if width > limits.gap and rate is not None and limits.surprise * rate.high > best.batches_per_s:
            return round(middle)
    return None


def _deeper_queue(situation: Situation, best: Seen, limits: Limits) -> Knobs | None:
    """Uneven batches empty a short queue now and then although the workers could keep up on average."""
    knobs = best.knobs
    deeper = knobs._replace(prefetch=min(2 * knobs.prefetch, limits.most_prefetch), persistent=True)
    known = {one.knobs[:2] for one in situation.seen} | {other[:2] for other in situation.failed}
    most, _ = most_workers(situation.room, deeper.prefetch, limits)
    once = knobs.prefetch == situation.seen[0].knobs.prefetch
    return deeper if once and 0 < knobs.workers <= most and deeper[:2] not in known else None
