"""Live tuning of one loader from pass to pass: who serves each one, and which workers live on to the next.

The script's own pool is torch's; every other is made here. What happens between two batches is `trying.py`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from fulltilt.recorder.loaders import LoaderTap
from fulltilt.tuning.live.diary import Diary, failure, in_force
from fulltilt.tuning.live.limits import Limits
from fulltilt.tuning.live.pools import Pool
from fulltilt.tuning.live.relay import Relay
from fulltilt.tuning.live.room import Room
from fulltilt.tuning.live.safety import reason_against
from fulltilt.tuning.live.trying import Phase, Trying
from fulltilt.tuning.live.turnover import Turnover
from fulltilt.tuning.live.window import Fetches
from fulltilt.tuning.live.workshop import PASSES_OVERLAP, Workshop, knobs_of


class LoaderTuner:
    """Tunes one loader. All of it runs on the thread that draws, between two batches."""

    def __init__(
        self,
        tap: LoaderTap,
        workshop: Workshop,
        diary: Diary,
        room: Callable[[LoaderTuner], Room],
        fetches: Callable[[], Fetches],
        limits: Limits,
    ) -> None:
        self.tap = tap
        self.diary = diary
        self._workshop = workshop
        self._trying = Trying(tap, workshop, diary, lambda: room(self), fetches, limits)
        self._turnover = Turnover(limits)
        self._relay: Callable[[], Relay | None] = lambda: None
        self._newest: Callable[[], Any] = lambda: None

    def pools(self) -> list[Pool]:
        """The pools that are alive, the script's own included."""
        return self._trying.pools()

    @property
    def tensors_per_batch(self) -> int:
        """As far as seen; 0 where nobody looked."""
        return self._trying.tensors_per_batch

    # ------------------------------------------------------------------ passes

    def begin(self, loader: Any, start: Callable[[], Any]) -> Any:
        """The source of a new pass: torch's own iterator or a pool of ours, behind a relay."""
        before = self._relay()
        is_one_for_all = self._workshop.loader is loader and self._workshop.user_persists
        if before is not None and not before.ended:
            if not is_one_for_all:
                before.overtaken = True
                return start()  # two loops that draw from one loader at once have torch's own each
            before.ended = True
            self.pass_abandoned(before)
        if self._workshop.loader is not loader:
            self._trying.adopt(knobs_of(loader))
            self._workshop.adopt(loader)
        theirs = self._workshop.can_begin_theirs()
        began_s = time.perf_counter()
        if theirs and self._trying.phase is Phase.LEFT_ALONE:
            source = start()
        elif theirs and self._trying.in_force == self._workshop.user and not self._trying.may_begin:
            source = self._begin_theirs(loader, start)
        else:
            source = self._begin_ours(loader)
        if before is not None and is_one_for_all:
            before.is_followed = True
        self._newest = weakref.ref(source)
        self._turnover.began(time.perf_counter() - began_s)
        if isinstance(source, Relay):
            self._relay = weakref.ref(source)
        return source

    def _begin_theirs(self, loader: Any, start: Callable[[], Any]) -> Any:
        iterator = self._workshop.begin_theirs(start)
        reason = reason_against(loader, iterator)
        if reason is not None:
            self._trying.leave_alone(reason)
            return iterator
        self._trying.drop_best()
        self._trying.best = Pool(iterator, self._workshop.user, own=False)
        orders = self._workshop.orders_of(iterator)
        self._trying.best.join(orders, is_open=True)
        if self._trying.best.knobs.workers == 0:
            self._trying.watch(iterator)
        return Relay(self, self._trying, orders, self._trying.best, loader)

    def _begin_ours(self, loader: Any) -> Relay:
        """A pass served by a pool of ours: the one that lives, or a new one if the data set has changed since."""
        orders = self._workshop.begin_ours()
        candidate = self._trying.candidate if self._trying.may_begin else None
        on_trial = candidate is not None
        knobs = candidate.knobs if candidate is not None else self._trying.in_force
        if on_trial:
            self._trying.drop_best()
        try:
            renewed = self._workshop.renew(candidate or self._trying.best)
            if renewed is None and not on_trial and self._trying.candidate is not None:
                self._trying.start_anew()
            is_left_alone = self._trying.phase is Phase.LEFT_ALONE
            pool = renewed or (self._workshop.make_final() if is_left_alone else self._trying.make(knobs))
        except Exception as error:
            for pool in self.pools():
                self._workshop.retire(pool, failed=True)
            on_trial = False
            self._trying.leave_alone(failure(knobs, error))
            pool = self._workshop.make_final()
        self._trying.persist_no_longer()
        pool.join(orders)
        if on_trial:
            self._trying.candidate = pool
            if self._trying.phase is Phase.STARTING:
                self._trying.begin_trial()
        else:
            self._trying.best = pool
        if self._workshop.user.workers:
            pool.open()  # the script's own workers would have begun; without any, nothing is drawn before next()
        return Relay(self, self._trying, orders, pool, loader)

    def pass_ended(self, relay: Relay) -> None:
        """All batches of a pass were given."""
        self._consider_persistence()
        self._between_passes(relay.serving)

    def pass_abandoned(self, relay: Relay) -> None:
        """A pass was left early, and its iterator is gone."""
        self._between_passes(relay.serving)

    def _between_passes(self, served: Pool) -> None:
        """The script's own pool ends with its pass, as it would without us; one that stood by is not needed again."""
        self._trying.unwatch()
        self._trying.window.pass_ended()
        if self._trying.best is not served:
            self._trying.drop_best()
        elif not served.own:
            self._trying.best = None

    def passes_overlap(self) -> None:
        """A pass goes on although another one has begun since."""
        if not self._workshop.user_persists:
            self._workshop.against_persistence = PASSES_OVERLAP
            self._trying.persist_no_longer()

    def newest(self) -> Iterator[Any]:
        """The source of the pass that began last; nothing where it was left."""
        return self._newest() or iter(())

    def first_arrived(self, wait_s: float) -> None:
        """The first batch of a pass came."""
        self._turnover.first_batch(wait_s)

    def _consider_persistence(self) -> None:
        """Workers that cost a good part of each pass to start should live on to the next."""
        user, knobs = self._workshop.user, self._trying.in_force
        if not user.workers or user.persistent or self._trying.candidate is not None or not self.tap.trains:
            return
        if not self._workshop.may_persist:
            return
        persistent = self._turnover.should_persist(knobs.persistent)
        if persistent != knobs.persistent and knobs[:3] == user[:3]:
            self._trying.in_force = knobs._replace(persistent=persistent)
            share = f"starting the workers of a pass took {100 * self._turnover.share:.0f} % of it"
            self.diary.persists(self._trying.in_force, share if persistent else "workers that live on did not pay")
            self.tap.in_force = in_force(self._trying.in_force)
