"""Which settings to try next while a job trains: a pure function of what was seen so far.

Workers come first: a leap to where they may be enough, then beside the best. Then comes the depth of the queue. A try
that does not pay is taken back by whoever called: the best so far is always in force.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fulltilt.tuning.live.capacity import Capacity, most_workers
from fulltilt.tuning.live.limits import DEFAULT, Limits
from fulltilt.tuning.live.window import Knobs, Seen
from fulltilt.tuning.search import Bracket


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a decision depends on. ``seen`` is in order, the start first; ``failed`` are settings that broke."""

    in_force: Knobs
    seen: tuple[Seen, ...]
    capacity: Capacity
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
    most, what = most_workers(situation.capacity, best.knobs.prefetch, limits)
    ceiling = ceiling_of(situation.seen)
    bracket = _bracket(situation, most, ceiling)
    workers = _next_workers(situation, bracket, limits)
    if workers is not None:
        knobs = Knobs(workers, best.knobs.prefetch, best.knobs.pin or situation.capacity.can_pin)
        return Try(knobs, (min(best.batches_per_s, bracket.hope(workers)), bracket.hope(workers)))
    deeper = _deeper_queue(situation, best, limits)
    if deeper is not None:
        most_wins = _queue_could_win(best, situation.capacity, limits) * best.batches_per_s
        return Try(deeper, (best.batches_per_s, min(most_wins, ceiling)))
    limit = f"; there is room for {most} workers ({what})" if best.knobs.workers >= most else ""
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


def _bracket(situation: Situation, most: int, ceiling: float) -> Bracket:
    start = situation.seen[0]
    one = _rate_of_one(start) if start.knobs.workers == 0 else None
    # The best of each number: a deeper queue may have been slower, and its rate would make other numbers promising.
    by_rate = sorted(situation.seen, key=lambda seen: seen.batches_per_s)
    rates = {seen.knobs.workers: seen.batches_per_s for seen in by_rate if seen.knobs.workers}
    rates.update({knobs.workers: 0.0 for knobs in situation.failed if knobs.workers not in rates})
    without_any = max((seen.batches_per_s for seen in situation.seen if not seen.knobs.workers), default=0.0)
    return Bracket(rates, most, one, ceiling, without_any)


def _next_workers(situation: Situation, bracket: Bracket, limits: Limits) -> int | None:
    """The number of workers to try next: first a leap to where it may be enough, then beside the best so far."""
    start = situation.seen[0]
    if bracket.most < 1:
        return None
    if len(situation.seen) + len(situation.failed) == 1 or not bracket.rates:
        half = max(1, round(bracket.most / 2))
        each = bracket.one or start.batches_per_s / start.knobs.workers
        first = min(half, math.ceil(limits.worker_headroom * bracket.ceiling / each))
        if first != start.knobs.workers:
            return first
    return bracket.next_count()


def _rate_of_one(start: Seen) -> float:
    """What one worker should give: the training thread's own fetching."""
    return start.batches_per_s / max(start.wait_share, 1e-9)


def _deeper_queue(situation: Situation, best: Seen, limits: Limits) -> Knobs | None:
    """Uneven batches empty a short queue now and then although the workers could keep up on average."""
    if _queue_could_win(best, situation.capacity, limits) < Bracket.WORTH:
        return None
    knobs = best.knobs
    deeper = knobs._replace(prefetch=min(2 * knobs.prefetch, limits.most_prefetch))
    known = {one.knobs[:2] for one in situation.seen} | {other[:2] for other in situation.failed}
    most, _ = most_workers(situation.capacity, deeper.prefetch, limits)
    once = knobs.prefetch == situation.seen[0].knobs.prefetch
    return deeper if once and 0 < knobs.workers <= most and deeper[:2] not in known else None


def _queue_could_win(best: Seen, capacity: Capacity, limits: Limits) -> float:
    """How many times as fast twice the queue could be.

    While one batch takes long, the other workers fill their queue and idle. Part of that can be won, unless the CPUs
    have others to work for meanwhile; workers that always have something to do make no more of a deeper queue.
    """
    idle, workers = best.idle_share, best.knobs.workers
    if idle is None or not workers:
        return math.inf
    of_idleness = limits.queue_wins * idle / max(1 - idle, 1e-9)
    fetching_cpus = workers * (1 - idle) * (capacity.cpu_share or 0.0)
    training_cpus = 1 - best.wait_share
    spare_cpus = max(capacity.cpus / capacity.ranks - fetching_cpus - training_cpus, 0.0)
    return 1 + min(of_idleness, spare_cpus / max(fetching_cpus, 1e-9))
