"""Live tuning of one loader, from pass to pass: measures, asks the controller, starts pools, keeps or takes back.

The script's own pool is torch's; every other is made here. During a trial the best so far stands by, so that going back
costs nothing and a pool that fails leaves the old one running.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

from fulltilt.timeline.loader_tap import LoaderTap
from fulltilt.tune.live.controller import Settle, Situation, Try, best_of, decide, pays
from fulltilt.tune.live.diary import Diary, in_force, words
from fulltilt.tune.live.limits import Limits
from fulltilt.tune.live.pools import Pool
from fulltilt.tune.live.relay import Relay
from fulltilt.tune.live.room import Room, most_workers
from fulltilt.tune.live.safety import reason_against, reason_of_sampler
from fulltilt.tune.live.serial import FetchWatch
from fulltilt.tune.live.turnover import Turnover
from fulltilt.tune.live.window import Arrival, Knobs, Seen, Window
from fulltilt.tune.live.workshop import Workshop, knobs_of


class Phase(Enum):
    """Where the tuning of a loader stands."""

    WATCHING = "measuring the settings in force"
    WANTING = "about to start a pool"
    STARTING = "waiting for the workers of a new pool"
    TRYING = "measuring a new pool"
    SETTLED = "done"
    LEFT_ALONE = "not to be tuned"


class LoaderTuner:
    """Tunes one loader. All of it runs on the thread that draws, between two batches."""

    def __init__(
        self, tap: LoaderTap, workshop: Workshop, diary: Diary, room: Callable[[LoaderTuner], Room], limits: Limits
    ) -> None:
        self.tap = tap
        self.diary = diary
        self.tensors_per_batch = 0
        self.phase = Phase.WATCHING
        self._workshop = workshop
        self._room = room
        self._limits = limits
        self._window = Window(limits)
        self._turnover = Turnover(limits)
        self._relay: Callable[[], Relay | None] = lambda: None
        self._in_force = Knobs(0)
        self._seen: tuple[Seen, ...] = ()
        self._failed: tuple[Knobs, ...] = ()
        self._best: Pool | None = None
        self._candidate: Pool | None = None
        self._wanted: Try | None = None
        self._started_s = 0.0
        self._watch: FetchWatch | None = None

    def pools(self) -> list[Pool]:
        """The pools that are alive, the script's own included."""
        return [pool for pool in (self._best, self._candidate) if pool is not None]

    # ------------------------------------------------------------------ passes

    def begin(self, loader: Any, start: Callable[[], Any]) -> Any:
        """The source of a new pass: torch's own iterator or a pool of ours, behind a relay."""
        before = self._relay()
        if before is not None and not before.ended:
            return start()  # two loops that draw from one loader at once have torch's own each
        if self._workshop.loader is not loader:
            self._adopt(loader)
        theirs = self._workshop.can_begin_theirs()
        if self.phase is Phase.LEFT_ALONE and theirs:
            return start()
        began_s = time.perf_counter()
        if theirs and self._candidate is None and self._in_force == self._workshop.user:
            source = self._begin_theirs(loader, start)
        else:
            source = self._begin_ours(loader)
        self._turnover.began(time.perf_counter() - began_s)
        if isinstance(source, Relay):
            self._relay = weakref.ref(source)
        return source

    def _adopt(self, loader: Any) -> None:
        """Take up a loader: the first, or one that the script made anew in the place of the last."""
        for pool in self.pools():
            self._workshop.retire(pool)
        self._best = self._candidate = self._wanted = None
        user = knobs_of(loader)
        if self.phase is Phase.LEFT_ALONE:
            self._in_force = user
        elif user != self._workshop.user or not self._seen:
            self._in_force = user
            self._seen, self._failed = (), ()
            self.phase = Phase.WATCHING
            self.diary.starts(user)
        elif self.phase is not Phase.SETTLED:
            self.phase = Phase.WATCHING
        self._workshop.adopt(loader)
        self._window.begin(self._in_force, self._limits.warm_up_batches)

    def _begin_theirs(self, loader: Any, start: Callable[[], Any]) -> Any:
        iterator = self._workshop.begin_theirs(start)
        reason = reason_against(loader, iterator)
        if reason is not None:
            self._leave_alone(reason)
            return iterator
        self._drop_best()
        self._best = Pool(iterator, self._workshop.user, own=False)
        orders = self._workshop.orders_of(iterator)
        self._best.join(orders, is_open=True)
        if self._best.knobs.workers == 0 and self.phase is Phase.WATCHING:
            self._watch = FetchWatch(iterator)
        return Relay(self, orders, self._best, loader)

    def _begin_ours(self, loader: Any) -> Relay:
        """A pass served by a pool of ours: the one that lives, or a new one if the data set has changed since."""
        orders = self._workshop.begin_ours()
        on_trial = self._candidate is not None
        knobs = self._candidate.knobs if self._candidate is not None else self._in_force
        if on_trial:
            self._drop_best()
        try:
            pool = self._workshop.renew(self._candidate or self._best) or self._workshop.make(knobs)
        except Exception as error:
            for pool in self.pools():
                self._workshop.retire(pool, failed=True)
            on_trial = False
            self._leave_alone(_back(knobs, error))
            pool = self._workshop.make_final()
        pool.join(orders)
        if on_trial:
            self._candidate = pool
            if self.phase is Phase.STARTING:
                self._begin_trial()
        else:
            self._best = pool
        if self._workshop.user.workers:
            pool.open()  # the script's own workers would have begun; without any, nothing is drawn before next()
        return Relay(self, orders, pool, loader)

    def pass_ended(self, relay: Relay) -> None:
        """All batches of a pass were given."""
        self._consider_persistence()
        self._between_passes(relay.serving)

    def pass_abandoned(self, relay: Relay) -> None:
        """A pass was left early, and its iterator is gone."""
        self._between_passes(relay.serving)

    def _between_passes(self, served: Pool) -> None:
        """The script's own pool ends with its pass, as it would without us; one that stood by is not needed again."""
        self._unwatch()
        self._window.pass_ended()
        if self._best is not served:
            self._drop_best()
        elif not served.own:
            self._best = None

    def _drop_best(self) -> None:
        """A pool that stood by in an earlier pass may still owe batches of it: it must not serve this one."""
        self._workshop.retire(self._best)
        self._best = None

    def _consider_persistence(self) -> None:
        """Workers that cost a good part of each pass to start should live on to the next."""
        user, knobs = self._workshop.user, self._in_force
        if not user.workers or user.persistent or self._candidate is not None or not self.tap.trains:
            return
        persistent = self._turnover.should_persist(knobs.persistent)
        if persistent != knobs.persistent and knobs[:3] == user[:3]:
            self._in_force = knobs._replace(persistent=persistent)
            share = f"starting the workers of a pass took {100 * self._turnover.share:.0f} % of it"
            self.diary.persists(self._in_force, share if persistent else "workers that live on did not pay")
            self.tap.in_force = in_force(self._in_force)

    # ------------------------------------------------------------------ between two batches

    def at_boundary(self, relay: Relay) -> None:
        """Move on, if something is due."""
        if self.phase is Phase.WANTING and relay.is_steady:
            with self.diary.costs():
                self._start(relay)
        elif self.phase is Phase.STARTING:
            self._switch_when_warm(relay)

    def first_arrived(self, wait_s: float) -> None:
        """The first batch of a pass came."""
        self._turnover.first_batch(wait_s)

    def arrived(self, relay: Relay, arrival: Arrival) -> None:
        """A batch came."""
        if self.phase not in (Phase.WATCHING, Phase.TRYING) or not relay.is_steady or not self.tap.trains:
            return
        seen = self._window.add(arrival)
        if seen is not None:
            with self.diary.costs():
                self._judge(relay, seen)

    def _judge(self, relay: Relay, seen: Seen) -> None:
        """A window is full: keep or take back what was tried, and decide what comes next."""
        if not self._seen and (reason := self._reason_against(relay)) is not None:
            self._leave_alone(reason)
            return
        if self.phase is Phase.TRYING:
            self._end_trial(relay, seen)
        else:
            self.diary.saw(seen)
        self._seen = (*self._seen, seen)
        self._decide()

    def _reason_against(self, relay: Relay) -> str | None:
        """What was seen of the sampler and of the fetches that speaks against other workers."""
        reason = reason_of_sampler(self._workshop.loader._index_sampler, relay.orders.sampler)
        if reason is None and self._watch is not None:
            self.tensors_per_batch = self._watch.tensors_per_batch
            reason = self._watch.problem()
        return reason

    def _decide(self) -> None:
        if not self._seen:
            self.phase = Phase.WATCHING
            return
        move = decide(Situation(self._in_force, self._seen, self._room(self), self._failed), self._limits)
        if isinstance(move, Settle):
            self.phase = Phase.SETTLED
            self._unwatch()
            self.diary.settled(move.why)
        else:
            self._wanted = move
            self.phase = Phase.WANTING
            self.diary.tries(move)

    def _start(self, relay: Relay) -> None:
        assert self._wanted is not None
        knobs = self._wanted.knobs
        most, what = most_workers(self._room(self), knobs.prefetch, self._limits)
        try:
            if knobs.workers > most:
                raise MemoryError(f"there is room for {most} workers ({what})")
            self._candidate = self._workshop.make(knobs, best_of(self._seen))
            self._candidate.call_roll()
        except Exception as error:
            self._give_up(knobs, error)
            self._decide()
        else:
            self._candidate.join(relay.orders)
            self._started_s = time.perf_counter()
            self.phase = Phase.STARTING

    def _switch_when_warm(self, relay: Relay) -> None:
        assert self._candidate is not None
        try:
            if not self._candidate.is_warm():
                if time.perf_counter() - self._started_s > self._limits.start_s:
                    raise TimeoutError(f"its workers did not start within {self._limits.start_s:.0f} s")
                return
        except Exception as error:
            self._workshop.retire(self._candidate, failed=True)
            self._give_up(self._candidate.knobs, error)
            self._decide()
            return
        relay.hand_over(self._candidate)
        self._begin_trial()

    def _begin_trial(self) -> None:
        assert self._candidate is not None
        knobs = self._candidate.knobs
        self.phase = Phase.TRYING
        self._unwatch()
        self._window.begin(knobs, skip=knobs.workers * knobs.prefetch)
        self.tap.in_force = in_force(knobs)

    def _end_trial(self, relay: Relay, seen: Seen) -> None:
        assert self._candidate is not None
        candidate, self._candidate = self._candidate, None
        before = next((one for one in reversed(self._seen) if one.knobs[:3] == self._in_force[:3]), best_of(self._seen))
        if pays(before, seen, self._limits):
            self._workshop.retire(self._best)
            self._workshop.trust(candidate)
            self._best, self._in_force = candidate, candidate.knobs
            self.diary.kept(seen)
        else:
            relay.hand_over(self._standing_by())
            self.diary.returned(seen)
        self.tap.in_force = in_force(self._in_force)

    def _standing_by(self) -> Pool:
        """The best pool so far, or another with its settings when a pass has ended since it served."""
        if self._best is None:
            self._best = self._workshop.make(self._in_force, best_of(self._seen))
        return self._best

    def ran_dry(self, pool: Pool) -> None:
        """A pool has given its last batch and another goes on."""
        if pool not in self.pools():
            self._workshop.retire(pool)

    # ------------------------------------------------------------------ when something is wrong

    def failed_at_work(self, relay: Relay, error: Exception) -> None:
        """A pool of ours broke. What it owed is made by the best so far, or by one with the script's own settings."""
        failing = relay.serving
        if failing is self._best or self.phase is Phase.LEFT_ALONE:
            self._best = None
            self._leave_alone(_back(failing.knobs, error))
            relay.replace_serving(self._workshop.make_final())
        else:
            self._give_up(failing.knobs, error)
            relay.replace_serving(self._standing_by() if relay.is_steady else self._workshop.make_final())
            self._decide()
        self._workshop.retire(failing, failed=True)

    def _give_up(self, knobs: Knobs, error: Exception) -> None:
        self._failed = (*self._failed, knobs)
        self._candidate = None
        self.diary.failed(_short(error))
        self.tap.in_force = in_force(self._in_force)

    def broke(self, error: Exception) -> None:
        """Tuning itself went wrong: whatever serves now goes on."""
        self._unwatch()
        self.phase = Phase.SETTLED
        self.diary.settled(f"tuning ended by an error of its own ({_short(error)})")

    def _leave_alone(self, why: str) -> None:
        self._unwatch()
        self.phase = Phase.LEFT_ALONE
        self._candidate = None
        self._in_force = self._workshop.user
        self.tap.in_force = {}
        self.diary.left_alone(why, self._workshop.user)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


def _back(knobs: Knobs, error: Exception) -> str:
    return f"{words(knobs)} failed ({_short(error)}): back to the script's own settings"


def _short(error: Exception) -> str:
    """The last line of what went wrong; before it stands a worker's own traceback."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")
