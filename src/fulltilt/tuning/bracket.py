"""How many workers to try next: the best so far is bracketed. Pure functions, asked by the study and by live tuning.

More workers help in proportion at best, and past a peak they harm, often at once: CLIP on 16 cores gave 1050, 1489 and
712 samples/s with 8, 12 and 16 workers. A smooth law through some of these points does not see the peak between them.
So the numbers beside the best are tried, a step beyond it and then the middle of a gap, wherever a proportional rise
from the number below could still beat it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# From the best to the next number beyond it.
STEP = 1.5
# Numbers of workers closer than this are not told apart by their rates.
GAP = 1.15
# A number that can at most be this much faster than the best is not worth a trial.
WORTH = 1.03
# Rates closer than this are the same; then the fewest workers count as the best, and what is below them is looked at.
SAME = 0.97
# What fewer workers than were ever tried may give, where nothing is known below them.
BLIND = 1.25


@dataclass(frozen=True, slots=True)
class Bracket:
    """What is known of a loader: ``rates`` by workers, 0 where a trial failed, and how many there may be at ``most``.

    ``one`` is what a single worker should give, where that is known otherwise; ``ceiling`` what training can take;
    ``to_beat`` what it has without workers.
    """

    rates: Mapping[int, float]
    most: int
    one: float | None = None
    ceiling: float = math.inf
    to_beat: float = 0.0

    def next_count(self) -> int | None:
        """The number of workers that should be tried next; None when none promises more."""
        if self._top == 0:
            return min(min(self.rates) // 2, self.most) or None  # all failed: with fewer there may be room
        beside = (count for count in self._beside_the_best() if count <= self.most)
        promising = [count for count in beside if self._could_beat(count)]
        return max(promising, key=self._hope, default=None)

    @property
    def best(self) -> int:
        """The fewest workers whose rate is the best, or cannot be told from it."""
        return min(count for count, rate in self.rates.items() if rate >= SAME * self._top)

    @property
    def _top(self) -> float:
        return max(self.rates.values())

    def _beside_the_best(self) -> Iterator[int]:
        """Numbers that were not tried yet: above the best, below it, and a single worker."""
        best = self.best
        above = min((count for count in self.rates if count > best), default=None)
        below = max((count for count in self.rates if count < best), default=0)
        if above is None:
            if best < self.most:
                yield min(self.most, max(best + 1, round(STEP * best)))
        elif above - best > 1 and above > GAP * best:
            yield min(max(round(math.sqrt(best * above)), best + 1), above - 1)
        if best - below > 1 and best > GAP * below:
            middle = max(round(math.sqrt(best * below)), round(best / STEP), below + 1)
            between = range(min(middle, best - 1, self.most), min(best, self.most + 1))
            yield next((count for count in between if self._could_beat(count)), between[-1])
        if self.one is not None and 1 not in self.rates:
            yield 1

    def _could_beat(self, count: int) -> bool:
        return self._hope(count) >= WORTH * max(self._top, self.to_beat)

    def _hope(self, count: int) -> float:
        """The most that so many workers may give: a rise in proportion from the nearest number below that is known."""
        known = {tried: rate for tried, rate in self.rates.items() if rate > 0}
        if self.one is not None:
            known.setdefault(1, self.one)
        below = max((tried for tried in known if tried <= count), default=None)
        return min(BLIND * self._top if below is None else known[below] * count / below, self.ceiling)
