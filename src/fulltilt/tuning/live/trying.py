"""Trying settings on one loader: measures, asks the controller, starts pools, keeps or takes back.

During a trial the best so far stands by, so that going back costs nothing and a pool that fails leaves it running. A
queue of another depth needs no other pool: the best itself is on trial with it. All of it runs on the thread that
draws, between two batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from fulltilt.recorder.loaders import LoaderTap
from fulltilt.tuning.live.controller import Settle, Situation, Try, best_of, decide, pays
from fulltilt.tuning.live.diary import Diary, failure, in_force, short
from fulltilt.tuning.live.limits import Limits
from fulltilt.tuning.live.pools import Pool
from fulltilt.tuning.live.room import Room, most_workers
from fulltilt.tuning.live.safety import reason_of_sampler
from fulltilt.tuning.live.serial import FetchWatch
from fulltilt.tuning.live.window import Arrival, Fetches, Knobs, Seen, Window
from fulltilt.tuning.live.witness import Differs
from fulltilt.tuning.live.workshop import Workshop

if TYPE_CHECKING:
    from fulltilt.tuning.live.relay import Relay


class Phase(Enum):
    """Where the tuning of a loader stands."""

    WATCHING = "measuring the settings in force"
    WANTING = "about to start a pool"
    STARTING = "waiting for the workers of a new pool"
    TRYING = "measuring a new pool"
    SETTLED = "done"
    LEFT_ALONE = "not to be tuned"


class Trying:
    """What is in force on one loader, what was tried, and what is on trial."""

    def __init__(
        self,
        tap: LoaderTap,
        workshop: Workshop,
        diary: Diary,
        room: Callable[[], Room],
        fetches: Callable[[], Fetches],
        limits: Limits,
    ) -> None:
        self.phase = Phase.WATCHING
        self.in_force = Knobs(0)
        self.best: Pool | None = None
        self.candidate: Pool | None = None
        self.tensors_per_batch = 0
        self.window = Window(limits, fetches)
        self._tap = tap
        self._workshop = workshop
        self._diary = diary
        self._room = room
        self._limits = limits
        self._seen: tuple[Seen, ...] = ()
        self._failed: tuple[Knobs, ...] = ()
        self._wanted: Try | None = None
        self._started_s = 0.0
        self._watch: FetchWatch | None = None
        # Whether workers have made the same batches as the training process.
        self._proven = False

    def pools(self) -> list[Pool]:
        """The pools that are alive, the script's own included."""
        second = None if self.candidate is self.best else self.candidate
        return [pool for pool in (self.best, second) if pool is not None]

    @property
    def may_begin(self) -> bool:
        """Whether a pool on trial may begin a pass. One that still starts up does so while the best goes on."""
        if self.candidate is None or self.phase is not Phase.STARTING:
            return self.candidate is not None
        try:
            return not self._is_serial and self.candidate.is_warm()  # beside no workers it has to prove itself first
        except Exception:
            return False  # the next batch will tell

    @property
    def _is_serial(self) -> bool:
        return self.in_force.workers == 0

    def adopt(self, user: Knobs) -> None:
        """A loader with these settings takes the place of the last; what was learned holds where they are the same."""
        for pool in self.pools():
            self._workshop.retire(pool)
        self.best = self.candidate = self._wanted = None
        same = user == self._workshop.user
        goes_on = self.phase is Phase.WATCHING and same
        if self.phase is Phase.LEFT_ALONE:
            self.in_force = user
        elif not same or not self._seen:
            self.in_force = user
            self._seen, self._failed = (), ()
            self.phase = Phase.WATCHING
            self._diary.starts(user)
            self._note_in_force()
        elif self.phase is not Phase.SETTLED:
            self.phase = Phase.WATCHING
        if not goes_on:  # the batches of short passes count together, also where each pass has a loader of its own
            self.window.begin(self.in_force, self._limits.warm_up_batches)

    def watch(self, iterator: Any) -> None:
        """Look at the fetches of a loader without workers until it has some."""
        if self.phase not in (Phase.WATCHING, Phase.WANTING):
            return
        try:
            self._watch = FetchWatch(iterator)
        except Exception as error:  # an object of the user's may answer anything, and fail at it
            self.leave_alone(f"its data set cannot be looked at ({short(error)})")

    def unwatch(self) -> None:
        """Enough was seen."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def drop_best(self) -> None:
        """One that only stood by is not needed any more; in an earlier pass, it may still owe batches of that."""
        if self.best is not self.candidate:
            self._workshop.retire(self.best)
        self.best = None

    # ------------------------------------------------------------------ between two batches

    def at_boundary(self, relay: Relay) -> None:
        """Move on, if something is due."""
        workers = [pool for pool in {*self.pools(), *relay.pools} if pool.own and pool.knobs.workers]
        if workers and self._workshop.script_changed_data_set():
            self._start_over(relay, workers)
        elif self.phase is Phase.WANTING and relay.is_steady and not self._awaits_witnesses():
            with self._diary.costs():
                self._start(relay)
        elif self.phase is Phase.STARTING:
            self._switch_when_warm(relay)

    def _awaits_witnesses(self) -> bool:
        """Whether no batch of this pass is known yet that workers could make over again."""
        if self._proven or not self._is_serial:
            return False
        return self._watch is None or not self._watch.has_looked

    def arrived(self, relay: Relay, arrival: Arrival) -> None:
        """A batch came."""
        if self.phase not in (Phase.WATCHING, Phase.TRYING) or not relay.is_steady or not self._tap.trains:
            return
        seen = self.window.add(arrival)
        if seen is not None:
            with self._diary.costs():
                self._judge(relay, seen)

    def _judge(self, relay: Relay, seen: Seen) -> None:
        """A window is full: keep or take back what was tried, and decide what comes next."""
        if not self._seen and (reason := self._reason_against(relay)) is not None:
            self.leave_alone(reason)
            return
        if self.phase is Phase.TRYING:
            self._end_trial(relay, seen)
        else:
            self._diary.saw(seen)
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
        move = decide(Situation(self.in_force, self._seen, self._room(), self._failed), self._limits)
        if isinstance(move, Settle):
            self.phase = Phase.SETTLED
            self.unwatch()
            self._diary.settled(move.why)
        else:
            self._wanted = replace(move, knobs=self._as_may_persist(move.knobs))
            self.phase = Phase.WANTING
            self._diary.tries(self._wanted)

    def _as_may_persist(self, knobs: Knobs) -> Knobs:
        return knobs._replace(persistent=knobs.persistent and self._workshop.may_persist)

    def persist_no_longer(self) -> None:
        """What is found must not tell the script to keep its workers, where something speaks against it."""
        without = self._as_may_persist(self.in_force)
        if without != self.in_force:
            self.in_force = without
            self._diary.persists(without, self._workshop.against_persistence or "")
            self._note_in_force()

    def _start(self, relay: Relay) -> None:
        assert self._wanted is not None
        if self._watch is not None and (reason := self._watch.problem()) is not None:
            self.leave_alone(reason)
            return
        knobs = self._wanted.knobs
        most, what = most_workers(self._room(), knobs.prefetch, self._limits)
        try:
            if knobs.workers > most:
                raise MemoryError(f"there is room for {most} workers ({what})")
            if self.best is not None and self.best.can_become(knobs):
                self.best.become(knobs)
                self.candidate = self.best
                self.begin_trial()
                return
            self.candidate = self.make(knobs)
            self.candidate.call_roll(self._watch.witnesses.kept if self._watch is not None else None)
        except Exception as error:
            self._give_up(knobs, error)
            self._decide()
        else:
            self.candidate.join(relay.orders)
            self._started_s = time.perf_counter()
            self.phase = Phase.STARTING

    def _switch_when_warm(self, relay: Relay) -> None:
        assert self.candidate is not None
        try:
            if not self.candidate.is_warm():
                if time.perf_counter() - self._started_s > self._limits.start_s:
                    raise TimeoutError(f"its workers did not start within {self._limits.start_s:.0f} s")
                return
        except Differs as error:
            self._workshop.retire(self.candidate, failed=True)
            self._give_up(self.candidate.knobs, error)
            self.leave_alone(str(error))
            return
        except Exception as error:
            self._workshop.retire(self.candidate, failed=True)
            self._give_up(self.candidate.knobs, error)
            self._decide()
            return
        self._proven = True
        is_of_this_pass = self.candidate.has_joined(relay.orders)
        if not (is_of_this_pass or self._workshop.user_persists or self._workshop.data_set_is_the_same()):
            self.start_anew()
            return
        relay.hand_over(self.candidate)
        self.begin_trial()

    def start_anew(self) -> None:
        """The pool that starts up has the data set of an earlier pass: another takes its place."""
        self._workshop.retire(self.candidate)
        self.candidate = None
        self.phase = Phase.WANTING

    def begin_trial(self) -> None:
        """The candidate serves from now on."""
        assert self.candidate is not None
        knobs = self.candidate.knobs
        self.phase = Phase.TRYING
        self.unwatch()
        self.window.begin(knobs, knobs.workers * knobs.prefetch, self._to_beat.batches_per_s)
        self._tap.serving_workers = knobs.workers

    @property
    def _to_beat(self) -> Seen:
        """What the settings in force gave when they were last looked at."""
        return next((one for one in reversed(self._seen) if one.knobs[:3] == self.in_force[:3]), best_of(self._seen))

    def _end_trial(self, relay: Relay, seen: Seen) -> None:
        assert self.candidate is not None
        if pays(self._to_beat, seen, self._limits):
            self.drop_best()
            self._workshop.trust(self.candidate)
            self.best, self.in_force = self.candidate, self.candidate.knobs
            self._diary.kept(seen)
            self.persist_no_longer()
        else:
            self._go_back(relay, self.candidate)
            self._diary.returned(seen)
        self.candidate = None
        self._note_in_force()

    def _go_back(self, relay: Relay, candidate: Pool) -> None:
        if self.best in (None, candidate) and candidate.can_become(self.in_force):
            candidate.become(self.in_force)
            self._workshop.trust(candidate)
            self.best = candidate
        else:
            relay.hand_over(self._standing_by())

    def _standing_by(self) -> Pool:
        """The best pool so far, or another with its settings when a pass has ended since it served."""
        if self.best is None:
            self.best = self.make(self.in_force)
        return self.best

    def make(self, knobs: Knobs) -> Pool:
        """Start a pool, with patience for batches that take as long as those seen so far."""
        return self._workshop.make(knobs, best_of(self._seen) if self._seen else None)

    def ran_dry(self, pool: Pool) -> None:
        """A pool has given its last batch and another goes on."""
        if pool not in self.pools():
            self._workshop.retire(pool)

    # ------------------------------------------------------------------ when something is wrong

    def failed_at_work(self, relay: Relay, error: Exception) -> None:
        """A pool of ours broke. What it owed is made by the best so far, or by one with the script's own settings."""
        failing = relay.serving
        if failing is self.candidate:
            self.best = None if failing is self.best else self.best
            self._give_up(failing.knobs, error)
            relay.replace_serving(self._standing_by())
            self._decide()
        else:
            if failing is self.best:
                self.best = None
                self.leave_alone(failure(failing.knobs, error))
            relay.replace_serving(self._workshop.make_final())
        self._workshop.retire(failing, failed=True)

    def _start_over(self, relay: Relay, workers: list[Pool]) -> None:
        """The script has changed its data set: the batches that workers have made ahead are not those of the script."""
        self.best = None
        self.leave_alone("the script changes its data set during a pass, which workers would not see")
        relay.start_over(self._workshop.make_final())
        for pool in workers:
            self._workshop.retire(pool)

    def _give_up(self, knobs: Knobs, error: Exception) -> None:
        self._failed = (*self._failed, knobs)
        self.candidate = None
        self._diary.failed(short(error))
        self._note_in_force()

    def _note_in_force(self) -> None:
        self._tap.in_force = in_force(self.in_force)
        self._tap.serving_workers = self.in_force.workers

    def broke(self, error: Exception) -> None:
        """Tuning itself went wrong: whatever serves now goes on."""
        self.unwatch()
        self.phase = Phase.SETTLED
        self._diary.settled(f"tuning ended by an error of its own ({short(error)})")

    def leave_alone(self, why: str) -> None:
        """Go back to the script's own settings for good."""
        self.unwatch()
        self.phase = Phase.LEFT_ALONE
        self.candidate = None
        self.in_force = self._workshop.user
        self._tap.in_force, self._tap.serving_workers = {}, None
        self._diary.left_alone(why, self._workshop.user)
