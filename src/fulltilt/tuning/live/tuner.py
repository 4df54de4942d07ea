"""Live tuning of one loader: measures what is in force, asks the controller, starts pools, keeps or takes back.

During a trial the best pool stands by, so that going back costs nothing. Pools end with their pass, unless the script's
own workers persist: what a script changes in its data set between two passes is seen as in the plain run.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from functools import partial
from typing import Any

import torch

from fulltilt.recorder.loaders import LoaderTap, LoaderTaps
from fulltilt.tuning.live.batch_check import BatchCheck
from fulltilt.tuning.live.capacity import Capacity, most_workers
from fulltilt.tuning.live.controller import Settle, Situation, Try, best_of, decide, pays
from fulltilt.tuning.live.history import History, settings_of, short, words
from fulltilt.tuning.live.index_queue import IndexQueue, reason_of_sampler
from fulltilt.tuning.live.limits import Limits
from fulltilt.tuning.live.switching_iterator import SwitchingIterator
from fulltilt.tuning.live.window import Arrival, Fetches, Knobs, Seen, Window
from fulltilt.tuning.live.worker_pool import (
    WorkerPool,
    copy_of,
    is_of_data_set,
    knobs_of,
    reason_against,
    sampler_of,
)

# Far from the seeds that torch gives the workers of one pool, one after the other.
SEED_STEP = 0x9E3779B97F4A7C15
OF_LOADER = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


class Phase(Enum):
    """Where the tuning of a loader stands."""

    WATCHING = "measuring the settings in force"
    CHECKING = "comparing what workers make with what the script has"
    STARTING = "waiting for the workers of a new pool"
    TRYING = "measuring a new pool"
    DONE = "nothing more is tried"


class LoaderTuner:
    """Tunes one loader. All of it runs on the thread that draws, between two batches."""

    def __init__(
        self,
        taps: LoaderTaps,
        tap: LoaderTap,
        history: History,
        capacity: Callable[[LoaderTuner], Capacity],
        fetches: Callable[[], Fetches],
        limits: Limits,
        exact: bool,
    ) -> None:
        self.tap = tap
        self.history = history
        self.user = self.in_force = Knobs(0)
        self.phase = Phase.WATCHING
        self.tensors_per_batch = 0
        self._taps = taps
        self._capacity = capacity
        self._limits = limits
        self._exact = exact
        self._window = Window(limits, fetches)
        self._seen: tuple[Seen, ...] = ()
        self._failed: tuple[Knobs, ...] = ()
        self._wanted = Try(self.user, (0.0, 0.0))
        self._check: BatchCheck | None = None
        self._left_alone = self._is_known = False
        self._loader: Callable[[], Any] = lambda: None
        self._source: Callable[[], SwitchingIterator | None] = lambda: None
        self._persistent: SwitchingIterator | None = None  # keeps the source of a loader whose workers persist
        self._persists = False
        self._seed_state = torch.Generator().get_state()
        self._seed = self._made = 0

    # ------------------------------------------------------------------ passes

    def begin(self, loader: Any, iterate: Callable[[Any], Any]) -> Any:
        """The source of a new pass; ``iterate`` is torch's own ``DataLoader.__iter__``.

        torch's own iterator serves a loader that is left alone, and a pass that begins while another goes on. Workers
        that persist have one iterator for all passes, and so they have here.
        """
        self._iterate = iterate
        if self._loader() is not loader:
            self._adopt(loader)
        source = self._source()
        goes_on = self._persists and source is not None
        if not goes_on and (self._left_alone or (source is not None and not source.ended)):
            return self._taps.with_meters(partial(iterate, loader), self.tap)
        if source is None or not goes_on:
            source = SwitchingIterator(self, copy_of(loader))
            self._source, self._persistent = weakref.ref(source), source if self._persists else None
        if self._check is not None:
            self._check.begin_pass()
        queue = self._begin_queue(loader, first=not goes_on)
        source.begin_pass(queue, self._pool_for_pass(source), at_once=self.user.workers > 0)
        return source

    def _adopt(self, loader: Any) -> None:
        """A loader takes the place of the last; what was learned holds where their settings are the same."""
        user, persists = knobs_of(loader), bool(loader.persistent_workers)
        same = self._is_known and (user, persists) == (self.user, self._persists)
        if self._persistent is not None:
            self._persistent.retire()
        self._source, self._persistent = (lambda: None), None
        self._loader = weakref.ref(loader)
        weakref.finalize(loader, self._forget, self._loader)
        self.user, self._persists = user, persists
        if self._left_alone:
            self.in_force = user
        elif not same:
            self._is_known = True
            self.in_force = user
            self.phase, self._check = Phase.WATCHING, None
            self._seen, self._failed = (), ()
            self.history.starts(user, persists)
            self._note_in_force()
            self._window.begin(user, self._limits.warm_up_batches)
            if (reason := reason_against(loader)) is not None:
                self.leave_alone(reason)

    def _forget(self, loader: Callable[[], Any]) -> None:
        """The script has dropped its loader: workers that persist end with it."""
        if self._loader is loader:
            self._persistent = None

    def _begin_queue(self, loader: Any, first: bool) -> IndexQueue:
        """Draw what ``iter(loader)`` draws from random generators, once and in the same order.

        That is the base seed, unless the script's own workers persist, and what the sampler draws when it is asked to
        begin. Workers are seeded from a copy of the generator: the first pool of a pass has the seed of the plain run.
        """
        sampler = sampler_of(loader)
        indices = iter(sampler)
        if first:
            self._seed_state = (loader.generator or torch.default_generator).get_state()
            self._seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
            self._made = 0
            if self.user.workers:
                indices = iter(sampler)
        return IndexQueue(indices, self.user.workers * self.user.prefetch, sampler)

    def _pool_for_pass(self, source: SwitchingIterator) -> WorkerPool:
        """A trial goes on in the next pass; where pools end with their pass, one that was starting up begins there."""
        if self.phase is Phase.TRYING or (self.phase is Phase.STARTING and not self._persists):
            try:
                if source.candidate is None:
                    source.candidate = self._make_candidate(source)
                if self.phase is Phase.STARTING:
                    self._begin_trial(source.candidate)
                return source.candidate
            except Exception as error:
                self._trial_failed(source, error)
        return self._best_of(source)

    def pass_ended(self, source: SwitchingIterator) -> None:
        """All batches of a pass were given."""
        if self._check is not None and self._check.has_some and not self._check.has_begun:
            self._begin_check(source, self._check)
        self._window.pass_ended()
        if not self._persists:
            source.retire()

    # ------------------------------------------------------------------ between two batches

    @property
    def collecting_check(self) -> BatchCheck | None:
        """The check that wants to see the next batch, if any."""
        check = self._check if self.phase is Phase.CHECKING else None
        return check if check is not None and check.is_collecting else None

    def at_boundary(self, source: SwitchingIterator) -> None:
        """Move on, if something is due."""
        if source.is_steady and self.phase is Phase.CHECKING:
            self._check_batches(source)
        elif source.is_steady and self.phase is Phase.STARTING:
            self._start_or_switch(source)

    def arrived(self, source: SwitchingIterator, arrival: Arrival) -> None:
        """Another batch came."""
        if self.phase not in (Phase.WATCHING, Phase.TRYING) or not source.is_steady or not self.tap.trains:
            return
        seen = self._window.add(arrival)
        if seen is not None:
            with self.history.costs():
                self._judge(source, self._with_pass_start(source, seen))

    def _with_pass_start(self, source: SwitchingIterator, seen: Seen) -> Seen:
        """Workers that end with their pass are started anew for the next: each batch bears its part of that."""
        workers = seen.knobs.workers
        try:
            batches = len(source)
        except TypeError:
            return seen
        if not workers or self._persists or not batches:
            return seen
        # A pool that began within the pass will wait for its first batch, too, when it begins one.
        start_s = (
            source.serving.start_s + workers / seen.batches_per_s if source.serving.start_s else source.first_wait_s
        )
        rate = 1 / (1 / seen.batches_per_s + start_s / batches)
        return seen._replace(batches_per_s=rate, wait_share=1 - rate * seen.busy_s)

    def _judge(self, source: SwitchingIterator, seen: Seen) -> None:
        """A window is full: keep or take back what was tried, and decide what comes next."""
        if (
            not self._seen
            and (reason := reason_of_sampler(sampler_of(source.loader), source.queue.indices)) is not None
        ):
            self.leave_alone(reason)
            return
        if self.phase is Phase.TRYING:
            self._end_trial(source, seen)
        else:
            self.history.saw(seen)
        self._seen = (*self._seen, seen)
        self._decide(source)

    def _decide(self, source: SwitchingIterator) -> None:
        situation = Situation(self.in_force, self._seen, self._capacity(self), self._failed)
        move = decide(situation, self._limits)
        if isinstance(move, Settle):
            self.phase = Phase.DONE
            self.history.settled(move.why)
            return
        self._wanted = move
        if self._check is None:
            self._check = BatchCheck(source.loader.dataset, source.loader.collate_fn, serial=not self.user.workers)
            self.phase = Phase.CHECKING
            self.history.checks()
        else:
            self._want()

    def _want(self) -> None:
        self.phase = Phase.STARTING
        self.history.tries(self._wanted)

    # ------------------------------------------------------------------ the check

    def _check_batches(self, source: SwitchingIterator) -> None:
        check = self._check
        assert check is not None
        if not check.has_begun and not check.is_collecting:
            self._begin_check(source, check)
        check.poll()
        if check.verdict is None:
            return
        self.tensors_per_batch = check.tensors_per_batch
        check.end()
        if check.verdict == BatchCheck.RANDOM and self._exact:
            self.leave_alone("its data set draws random numbers, which in other workers would be others (--exact)")
        elif check.verdict in (BatchCheck.SAME, BatchCheck.RANDOM):
            if check.verdict == BatchCheck.RANDOM:
                self.history.draws_random_numbers()
            self._want()
        else:
            self.leave_alone(check.verdict)

    def _begin_check(self, source: SwitchingIterator, check: BatchCheck) -> None:
        with self.history.costs():
            check.begin(lambda workers: self._make(source, Knobs(workers), metered=False))

    # ------------------------------------------------------------------ trials

    def _start_or_switch(self, source: SwitchingIterator) -> None:
        try:
            if source.candidate is None:
                with self.history.costs():
                    source.candidate = self._make_candidate(source)
                    source.candidate.start()
                self._started_s = time.perf_counter()
            if not source.candidate.is_ready():
                if time.perf_counter() - self._started_s > self._limits.start_s:
                    raise TimeoutError(f"its workers did not start within {self._limits.start_s:.0f} s")
                return
        except Exception as error:
            self._trial_failed(source, error)
            return
        source.best = source.serving
        source.hand_over(source.candidate)
        self._begin_trial(source.candidate)

    def _make_candidate(self, source: SwitchingIterator) -> WorkerPool:
        knobs = self._wanted.knobs
        most, what = most_workers(self._capacity(self), knobs.prefetch, self._limits)
        if knobs.workers > most:
            raise MemoryError(f"there is room for {most} workers ({what})")
        return self._make(source, knobs)

    def _begin_trial(self, candidate: WorkerPool) -> None:
        knobs = candidate.knobs
        self.phase = Phase.TRYING
        self._window.begin(knobs, knobs.workers * knobs.prefetch, self._to_beat.batches_per_s)
        self.tap.serving_workers = knobs.workers

    @property
    def _to_beat(self) -> Seen:
        """What the settings in force gave when they were last looked at."""
        return next((one for one in reversed(self._seen) if one.knobs == self.in_force), best_of(self._seen))

    def _end_trial(self, source: SwitchingIterator, seen: Seen) -> None:
        if pays(self._to_beat, seen, self._limits):
            if source.best is not None:
                source.best.retire()
            source.best, source.candidate = source.candidate, None
            self.in_force = seen.knobs
            self.history.kept(seen)
        else:
            source.candidate = None
            source.hand_over(self._best_of(source))
            self.history.returned(seen)
        self._note_in_force()

    def _trial_failed(self, source: SwitchingIterator, error: Exception) -> None:
        if source.candidate is not None:
            source.candidate.retire()
            source.candidate = None
        self._failed = (*self._failed, self._wanted.knobs)
        self.history.failed(short(error))
        self._note_in_force()
        self._decide(source)

    def _best_of(self, source: SwitchingIterator) -> WorkerPool:
        """The pool with the settings in force, made anew where the one before ended with its pass."""
        if source.best is None:
            source.best = self._make(source, self.in_force)
        return source.best

    def _make(self, source: SwitchingIterator, knobs: Knobs, metered: bool = True) -> WorkerPool:
        """A pool, with patience for batches that take as long as those seen so far."""
        self._made += 1
        generator = torch.Generator()
        if self._made == 1:
            generator.set_state(self._seed_state)
        else:
            generator.manual_seed((self._seed + SEED_STEP * self._made) % 2**63)
        batch_s = max(knobs.workers, 1) / best_of(self._seen).batches_per_s if self._seen else 0.0
        patience_s = max(self._limits.batch_s, math.ceil(self._limits.batch_times * batch_s))
        meter = partial(self._taps.with_meters, tap=self.tap) if metered else lambda start: start()
        own = knobs == self.user and metered
        return WorkerPool(source.loader, knobs, generator, self._iterate, meter, None if own else patience_s)

    def ran_dry(self, source: SwitchingIterator, pool: WorkerPool) -> None:
        """A pool has given its last batch and another goes on."""
        if pool not in (source.best, source.candidate):
            pool.retire()

    # ------------------------------------------------------------------ when something is wrong

    def replace_failed(self, source: SwitchingIterator, pool: WorkerPool, error: Exception) -> WorkerPool:
        """A pool of ours broke: the best so far goes on, or one with the script's own settings."""
        if pool is source.candidate:
            self._trial_failed(source, error)
            if is_of_data_set(error) and not self.user.workers:
                self.leave_alone(f"its data set works in the training process only ({short(error)})")
        else:
            source.best = None
            pool.retire()
            self.leave_alone(f"{words(pool.knobs)} failed ({short(error)}): back to the script's own settings")
        return self._best_of(source)

    def make_here(self, source: SwitchingIterator, indices: Any) -> tuple[Any, Any]:
        """A batch, made in the training process. Raises what the script's data set raises there."""
        pool = self._make(source, self.user._replace(workers=0))
        pool.serve(IndexQueue(iter([indices])))
        return pool.draw()

    def broke(self, error: Exception) -> None:
        """Tuning itself went wrong: whatever serves now goes on."""
        self.phase = Phase.DONE
        self.history.settled(f"tuning ended by an error of its own ({short(error)})")

    def leave_alone(self, why: str) -> None:
        """Go back to the script's own settings for good."""
        self.phase = Phase.DONE
        self._left_alone = True
        self.in_force = self.user
        self.history.left_alone(why)
        self.tap.in_force, self.tap.serving_workers = {}, None

    def _note_in_force(self) -> None:
        settings = asdict(settings_of(self.in_force, self._persists))
        self.tap.in_force = {name: settings[name] for name in OF_LOADER}
        self.tap.in_force["persistent_workers"] = bool(settings["persistent_workers"])
        self.tap.serving_workers = self.in_force.workers
