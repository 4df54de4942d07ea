"""The ranks of a job step by step: which was last at the exchange, by how much, and whether it is always the same.

Steps are aligned by their number, never by a clock: all ranks leave the exchange of a step together, and those that
worked less before it wait for the others. A window is a few steps, the fewest that the ranks' spans resolve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import comb
from statistics import median

from fulltilt.diagnosis.ledger import hung_after_s, wall_seconds
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.records import Buckets, RankRecord, RankSummary, Run, Span

MOST_WINDOWS = 400
# The first steps warm up, for a different time on each rank.
WARMING_UP = 2
# The fewest windows with a clearly late rank from which one can tell whether it is always the same.
LEAST_EVENTS = 8


# What one rank had worked, without waiting for others, and waited for data, in seconds, by the number of steps made.
Work = list[tuple[int, float, float]]


def _work_of(spans: tuple[Span, ...]) -> Work:
    work: Work = [(0, 0.0, 0.0)]
    own_s = data_wait_s = 0.0
    for span in spans:
        buckets = span.buckets
        own_s += max(span.t1_s - span.t0_s - buckets.communication_s - buckets.startup_s, 0.0)
        data_wait_s += buckets.data_wait_s
        if span.steps:
            work.append((work[-1][0] + span.steps, own_s, data_wait_s))
    return work


def _at(work: Work, step: int) -> tuple[float, float]:
    """Own work and data wait when it had made so many steps; between two spans in proportion."""
    place = min(bisect_left(work, step, key=lambda done: done[0]), len(work) - 1)
    (before, *earlier), (after, *later) = work[max(place - 1, 0)], work[place]
    part = (step - before) / (after - before) if after > before else 1.0
    own_s, data_wait_s = (low + part * (high - low) for low, high in zip(earlier, later, strict=True))
    return own_s, data_wait_s


@dataclass(frozen=True, slots=True)
class Window:
    """A few steps: how long each rank worked in them, which was last, and how late compared with the others' median.

    ``data_wait_s`` is how much longer the last one waited for data.
    """

    steps: int
    own_s: tuple[float, ...]
    last: int
    late_s: float
    data_wait_s: float


@dataclass(frozen=True)
class RankSteps:
    """All windows of a run. Ranks are indices into the run's ranks."""

    windows: tuple[Window, ...]
    hosts: tuple[str, ...]
    step_s: float

    @cached_property
    def events(self) -> list[Window]:
        """The windows in which a rank was clearly late."""
        least_s = THRESHOLDS.late_share * self.step_s
        return [window for window in self.windows if window.late_s >= least_s * window.steps]

    @cached_property
    def late_s(self) -> float:
        """How long the others waited for the last rank, over all events."""
        return sum(window.late_s for window in self.events)

    def steady(self) -> tuple[int, ...]:
        """The rank that is last most of the time, or all ranks of such a machine; none if that may be chance."""
        events, ranks = len(self.events), range(len(self.hosts))
        if events < LEAST_EVENTS or len(ranks) < 2:
            return ()
        parts = (ranks, THRESHOLDS.steady_share), (self.hosts, THRESHOLDS.steady_host_share)
        for part_of, least_share in parts:  # each rank by itself, then the ranks of each machine
            late, times = Counter(part_of[window.last] for window in self.events).most_common(1)[0]
            there = tuple(rank for rank in ranks if part_of[rank] == late)
            chance = _by_chance(times, events, len(there) / len(ranks))
            if times / events >= least_share and chance < THRESHOLDS.chance:
                return there
        return ()

    def last_share(self, rank: int) -> float:
        """The share of the events in which this rank was last."""
        return sum(window.last == rank for window in self.events) / len(self.events) if self.events else 0.0

    def usual_s(self, rank: int) -> float:
        """This rank's own work in a typical step."""
        return median(window.own_s[rank] / window.steps for window in self.windows)

    def past_speed(self, rank: int) -> float | None:
        """This rank's speed in its last steps over that in its first; None for few steps."""
        third = len(self.windows) // 3
        if third < LEAST_EVENTS:
            return None
        parts = self.windows[:third], self.windows[-third:]
        first_s, last_s = (median(window.own_s[rank] / window.steps for window in part) for part in parts)
        return first_s / last_s if last_s > 0 else None


def align(run: Run) -> RankSteps | None:
    """The steps of all ranks side by side; None for a single rank, or where there is nothing to compare."""
    work = [_work_of(spans) for spans in run.spans]
    common = min((one[-1][0] for one in work), default=0)
    if len(work) < 2 or common <= WARMING_UP:
        return None
    borders = [step for step, _, _ in min(work, key=len) if WARMING_UP <= step <= common]
    borders = borders[:: max(-(-len(borders) // MOST_WINDOWS), 1)]
    if len(borders) < 2:
        return None
    at = [[_at(one, step) for step in borders] for one in work]
    windows = []
    for place in range(1, len(borders)):
        own = tuple(max(rank[place][0] - rank[place - 1][0], 0.0) for rank in at)
        waits = [rank[place][1] - rank[place - 1][1] for rank in at]
        last = max(range(len(own)), key=own.__getitem__)
        late_s = own[last] - median(own[:last] + own[last + 1 :])
        waited_s = max(waits[last] - median(waits[:last] + waits[last + 1 :]), 0.0)
        windows.append(Window(borders[place] - borders[place - 1], own, last, late_s, waited_s))
    ends = [span for span in run.spans[0] if span.steps]
    step_s = sum(span.t1_s - span.t0_s - span.buckets.startup_s for span in ends) / sum(span.steps for span in ends)
    return RankSteps(tuple(windows), tuple(rank.hostname for rank in run.ranks), step_s)


def compare_ranks(run: Run, each: list[Buckets], steps: RankSteps | None = None) -> tuple[RankSummary, ...]:
    """Each rank's own work by its ledger, which of them is the slowest, how long the others wait, and their speeds."""
    wall_s = wall_seconds(run)
    own_s = [max(wall_s - b.startup_s - b.unattributed_s - b.communication_s, 0.0) for b in each]
    usual_s = [steps.usual_s(place) for place in range(len(each))] if steps is not None else []
    longest_s = max(own_s, default=0.0)
    return tuple(
        RankSummary(
            rank=run.ranks[i].rank,
            buckets=buckets,
            steps=sum(span.steps for span in run.spans[i]),
            own_work_s=own_s[i],
            # A rank can only have waited while it was exchanging gradients.
            waits_s=min(longest_s - own_s[i], buckets.communication_s),
            slowest=i == own_s.index(longest_s),
            hostname=run.ranks[i].hostname,
            finished=run.ranks[i].finished,
            relative_speed=min(usual_s) / usual_s[i] if usual_s and usual_s[i] > 0 else None,
            own_past_speed=steps.past_speed(i) if steps is not None else None,
            last_share=steps.last_share(i) if steps is not None else None,
        )
        for i, buckets in enumerate(each)
    )


def _by_chance(times: int, events: int, probability: float) -> float:
    """How likely it is that one of equal ranks is last so often."""
    return sum(comb(events, k) * probability**k * (1 - probability) ** (events - k) for k in range(times, events + 1))


# --------------------------------------------------------------------------- a job that makes no steps


@dataclass(frozen=True, slots=True)
class Standstill:
    """No rank has made a step for ``for_s``: the ``waiting`` ranks wait in a collective for the ``missing`` ones.

    With each missing rank: how many seconds it has written nothing; None where it still writes.
    """

    for_s: float
    missing: tuple[tuple[RankRecord, float | None], ...]
    waiting: tuple[RankRecord, ...]


def standstill(run: Run) -> Standstill | None:
    """Which ranks wait for which in a job that makes no steps; None while it goes on."""
    ends_s = [span.t1_s for spans in run.spans for span in spans if span.steps]
    alive = [rank for rank in run.ranks if not rank.finished]
    if len(run.ranks) < 2 or not ends_s or not alive or run.run.state == "done":
        return None
    now_s = max(rank.t1_s for rank in alive)
    for_s = now_s - max(ends_s)
    if for_s < hung_after_s(run):
        return None
    silent_s = THRESHOLDS.silent_s * max(len(run.ranks) / 64, 1)  # very many ranks write less often
    silent = [rank for rank in alive if now_s - rank.t1_s > silent_s]
    # A rank that is alive but in no collective keeps the others waiting; if that tells nothing, the steps made may.
    since = [(rank, rank.under_way) for rank in alive]
    in_collective = [r for r, span in since if span and 2 * span.buckets.communication_s >= span.t1_s - span.t0_s]
    missing = silent or [rank for rank in alive if rank not in in_collective]
    if len(missing) == len(alive):
        fewest = min(rank.steps for rank in alive)
        missing = [rank for rank in alive if rank.steps == fewest]
    if not missing or len(missing) == len(alive):
        return None
    silences = tuple((rank, now_s - rank.t1_s if rank in silent else None) for rank in missing)
    return Standstill(for_s, silences, tuple(rank for rank in alive if rank not in missing))
