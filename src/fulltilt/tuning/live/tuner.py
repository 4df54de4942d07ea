"""Live tuning of one loader: measures the settings in force, asks the controller, tries other pools, keeps or reverts.

A job slows down and speeds up by itself: after each trial that does not clearly pay, the settings in force are measured
again. A new pool continues where the one before ends. Pools end with their pass, unless the script's own workers
persist: what a script changes in its data set between passes takes effect as in the plain run.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import torch

from fulltilt.errors import FulltiltError
from fulltilt.figures import count, loader_settings
from fulltilt.recorder.dataset_state import AttributeWatch
from fulltilt.recorder.loaders import LoaderStats
from fulltilt.records import LiveMove, LiveRecord, Settings
from fulltilt.tuning.live.controller import Capacity, Settle, at_pace_of, best_of, decide, pays, pays_clearly
from fulltilt.tuning.live.loader_check import (
    DRAWS,
    BatchCheck,
    reason_against,
    reason_in,
    reason_of_sampler,
    reason_of_thread,
    refusing,
    short,
)
from fulltilt.tuning.live.loader_pool import (
    IndexQueue,
    LoaderPool,
    copy_of,
    is_of_data_set,
    knobs_of,
    sampler_of,
    shuffler_of,
    starts_slowly,
)
from fulltilt.tuning.live.measurement import (
    LOOK_EVERY_S,
    Arrival,
    Knobs,
    Measurement,
    MeasurementWindow,
    pace_changed,
    with_outcome,
    with_rates,
)
from fulltilt.tuning.live.process import TunedProcess
from fulltilt.tuning.live.rank_reports import Report
from fulltilt.tuning.live.switching_iterator import SwitchingIterator
from fulltilt.tuning.search_space import LOADER_SETTINGS

# Far apart, since torch gives the workers of a pool consecutive seeds.
SEED_STEP = 0x9E3779B97F4A7C15
RANDOM_DRAWS = "the data set draws random numbers: other workers draw other numbers of the same distribution"
LATER_SHUFFLES = ", and later epochs are shuffled differently, from the same generator"
WATCHED = "not enough batches were measured yet"
WAITING = "waiting for the reports of the other ranks"


class Phase(Enum):
    """What the tuner of a loader is doing."""

    WATCHING = "measuring the settings in force"
    CHECKING = "comparing batches of workers with the script's, before the first trial"
    TRYING = "measuring a new pool"
    AGREEING = "waiting until all ranks have reported"
    DONE = "nothing more is tried"


class LoaderTuner:
    """Tunes one loader, on the thread that draws, between two batches. ``record`` is for reports."""

    def __init__(self, process: TunedProcess, stats: LoaderStats) -> None:
        self.stats = stats
        self.drawn = 0  # batches, over all passes
        self._process = process
        self._limits = process.limits
        self._window = MeasurementWindow(process.limits)
        self._left_alone = self._is_known = False
        self._reported, self._batches_per_s, self._key = 0, 0.0, ""
        self._look_at_s = 0.0
        self._loader: Callable[[], Any] = lambda: None
        self._source: Callable[[], SwitchingIterator | None] = lambda: None
        self._seed_state = torch.Generator().get_state()
        self._seed = self._made = 0
        self._reset(Knobs(0), persists=False)

    def _reset(self, user: Knobs, persists: bool, cost_s: float = 0.0) -> None:
        """Start over with a loader of which only the script's settings are known."""
        self.user = self.in_force = self._wanted = user
        self._persists = persists
        self.phase = Phase.WATCHING
        self._check: BatchCheck | None = None
        self._is_checked = self._is_trying = False
        self._agreed: Report | None = None
        self._seen: tuple[Measurement, ...] = ()
        self._tried: Measurement | None = None  # the trial, until the settings in force are measured again
        self._failed: tuple[Knobs, ...] = ()
        self._undecided: tuple[Knobs, ...] = ()  # tried once, undecided whether they pay
        own = self._settings(user)
        self.record = LiveRecord(self.stats.loader_id, "watching", WATCHED, own, own, cost_s=cost_s)
        self._window.begin(user, self._limits.warm_up_batches)

    # ------------------------------------------------------------------ passes

    def begin(self, loader: Any, iterate: Callable[[Any], Any]) -> Any:
        """The iterator of a new pass; ``iterate`` is torch's own ``DataLoader.__iter__``.

        torch's own iterator serves a loader that is left alone, and a pass that begins during another one, also over
        another loader of the same line. Persistent workers have one iterator for all passes, which the loader holds, as
        in torch: a script that sets it to None has its workers started anew.
        """
        self._iterate = iterate
        source, is_same = self._source(), self._loader() is loader
        is_busy = source is not None and not source.ended
        if not is_same and not is_busy:
            source = self._adopt(loader)
        kept = vars(loader).get("_iterator")
        goes_on = self._persists and source is not None and source is kept and (is_same or not is_busy)
        if not goes_on and isinstance(kept, SwitchingIterator):  # torch would draw from it
            kept = vars(loader)["_iterator"] = None
        if not goes_on and (self._left_alone or is_busy or kept is not None):
            return self._process.session.loaders.start_workers(partial(iterate, loader), self.stats)
        if source is None or not goes_on:
            source = SwitchingIterator(self, copy_of(loader))
        self._source = weakref.ref(source)
        if self._check is not None:
            self._check.begin_pass()
        queue = self._begin_queue(loader, first=not goes_on)
        source.begin_pass(queue, source.pool or self._pool_in_force(source), at_once=self.user.num_workers > 0)
        if self._persists:
            vars(loader)["_iterator"] = source
        return source

    def _adopt(self, loader: Any) -> SwitchingIterator | None:
        """Take over a loader, with its persistent workers if it has been here before.

        What was learned still holds where its settings are the same.
        """
        user, persists = knobs_of(loader), bool(loader.persistent_workers)
        same = self._is_known and (user, persists) == (self.user, self._persists)
        self._loader = weakref.ref(loader)
        if self._left_alone:
            self.user = self.in_force = user
            self._persists = persists
        elif not same:
            self._is_known = True
            self._reset(user, persists, self.record.cost_s)
            self._note_in_force()
            if (reason := reason_against(loader)) is not None:
                self.leave_alone(reason)
        source = vars(loader).get("_iterator")
        if not isinstance(source, SwitchingIterator):
            return None
        if source.pool is None or source.pool.knobs == self._serving:
            return source
        source.retire()
        return None

    @property
    def _serving(self) -> Knobs:
        """The settings of a trial that continues in the next pass, else those in force."""
        return self._wanted if self._is_trying else self.in_force

    def _begin_queue(self, loader: Any, first: bool) -> IndexQueue:
        """Draw the same random numbers as ``iter(loader)``, once and in the same order.

        These are the base seed, unless the script's workers persist, and what the sampler draws when it begins. Workers
        are seeded from a copy of the generator: the first pool of a pass has the seed of the plain run.
        """
        sampler = sampler_of(loader)
        indices = iter(sampler)
        if first:
            self._seed_state = (loader.generator or torch.default_generator).get_state()
            self._seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
            self._made = 0
            if self.user.num_workers:
                indices = iter(sampler)
        return IndexQueue(indices, sampler)

    def _pool_in_force(self, source: SwitchingIterator) -> LoaderPool:
        pool = self._make(source, self._serving)
        pool.on_trial = self._is_trying
        watched = (source.loader.dataset, source.loader.collate_fn)
        if not self.user.num_workers:  # changes between two batches have an effect in the plain run
            source.watch = AttributeWatch(watched) if pool.knobs.num_workers else None
        elif source.watch is None and self.phase is not Phase.DONE:  # workers have it as it was when they were started
            source.watch = AttributeWatch(watched)
        return pool

    def pass_ended(self, source: SwitchingIterator) -> None:
        """All batches of a pass were given."""
        if self.phase is Phase.CHECKING and self._check is not None and self._check.may_begin:
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
        """Take the next step of tuning, if one is due."""
        check = self._check
        if self.user.num_workers and self.phase is Phase.DONE:
            source.watch = None  # no more pools are started
        if source.watch is not None and (name := source.watch.changed()) is not None:
            source.watch = None
            if not self.user.num_workers:
                self.leave_alone(f"the script changes its data set during a pass ({name}), which workers would not see")
                source.replace(self._make(source, self.user))
            else:
                self.leave_alone(f"the script changes its data set ({name}), which only later workers would see")
        if self.phase is Phase.AGREEING and source.is_steady:
            self._look_for_others(source)
        if self.phase is not Phase.CHECKING or check is None or not source.is_steady:
            return
        if check.may_begin and not check.is_collecting:
            self._begin_check(source, check)
        if check.verdict is None:
            return
        if self._is_checked:
            self._try(source)
        elif check.verdict == BatchCheck.RANDOM and self._process.exact:
            self.leave_alone(DRAWS)
        elif check.verdict not in (BatchCheck.SAME, BatchCheck.RANDOM):
            self.leave_alone(check.verdict)
        else:
            self._report(source, is_random=check.verdict == BatchCheck.RANDOM)

    def _begin_check(self, source: SwitchingIterator, check: BatchCheck) -> None:
        with self._costs():
            check.begin(source.loader, lambda workers: self._make(source, Knobs(workers), metered=False))

    def arrived(self, source: SwitchingIterator, arrival: Arrival) -> None:
        """Another batch came."""
        if self.phase not in (Phase.WATCHING, Phase.TRYING) or not source.is_steady or not self.stats.trains:
            return
        seen = self._window.add(arrival)
        if seen is None:
            return
        if self._process.ranks is None and not self._process.is_alone():
            return  # no process group yet
        with self._costs():
            self._batches_per_s = seen.batches_per_s
            if (reason := reason_of_thread(source.loader)) is None and not self._seen:
                reason = reason_of_sampler(sampler_of(source.loader), source.queue.indices)
            if (reason := reason or self._too_short(source) or self._process.reason_of_job()) is not None:
                self.leave_alone(reason)
            else:
                self._report(source, seen=self._with_pass_start(source, seen))

    def _too_short(self, source: SwitchingIterator) -> str | None:
        """Why passes show no rate: most of their batches are in the queue before the first is drawn."""
        batches, queued = _length(source), self.user.num_workers * self.user.prefetch_factor
        if batches is None or self._persists or batches >= self._limits.shortest_pass * queued:
            return None
        return f"its passes of {count('batch', batches)} are too short to measure: keep its workers alive"

    def _with_pass_start(self, source: SwitchingIterator, seen: Measurement) -> Measurement:
        """Spread the time to start workers, which end with their pass, over the batches of a pass."""
        workers, batches = seen.knobs.num_workers, _length(source)
        if not workers or self._persists or not batches or source.pool is None:
            return seen
        start_s = source.pool.start_s + workers / seen.batches_per_s  # until the first batch was made
        rate = 1 / (1 / seen.batches_per_s + start_s / batches)
        return seen._replace(batches_per_s=rate, wait_share=1 - rate * seen.busy_s)

    def _report(self, source: SwitchingIterator, **what: Any) -> None:
        """Act on this report, or, in a job of several ranks, write it for all of them to agree on."""
        tensors = self._check.tensors_per_batch if self._check is not None else 0
        capacity = self._process.capacity(self.stats, tensors)
        report = self._process.report(self.stats, self.drawn, self.user, capacity, **what)
        if (ranks := self._process.ranks) is None:
            self._act(source, report)
            return
        try:
            ranks.write(report)
        except FulltiltError as error:  # the disk is full
            self.broke(error)
            return
        self._reported += 1
        self._key, self.phase = report.loader, Phase.AGREEING
        self._note(self.record.state, WAITING, ranks=ranks.world_size)

    def _look_for_others(self, source: SwitchingIterator) -> None:
        """Act at the agreed batch on what the ranks agreed on."""
        now_s, ranks = time.perf_counter(), self._process.ranks
        if self._agreed is None and ranks is not None and now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_EVERY_S
            with self._costs():
                self._agreed = ranks.agreed(self._key, self._reported - 1, self.drawn, self._batches_per_s)
                missing = "" if ranks.waiting_for is None else f" (rank {ranks.waiting_for} has not reported)"
                self._note(self.record.state, WAITING + missing)
        if self._agreed is not None and self.drawn >= self._agreed.batch:
            agreed, self._agreed = self._agreed, None
            with self._costs():
                self._act(source, agreed)

    def _act(self, source: SwitchingIterator, agreed: Report) -> None:
        """Take the next step; all ranks take the same one, from the same figures."""
        if agreed.left_alone is not None:
            self.leave_alone(agreed.left_alone)
            # The script's own workers have the data set as it was when they were started; later ones may not.
            if source.pool is not None and source.pool.knobs != self.user and not self.user.num_workers:
                source.hand_over(self._make(source, self.user))
        elif agreed.failed is not None:
            if self._is_trying:
                self._trial_failed(source, agreed.failed)
            self._decide(source, agreed.capacity)
        elif agreed.is_random is not None:
            self._is_checked = True
            if agreed.is_random and self._check is not None:
                shuffler = shuffler_of(sampler_of(source.loader))
                shuffles_too = self._check.draws_from_torch and shuffler is not None and shuffler.generator is None
                self.record = replace(self.record, note=RANDOM_DRAWS + (LATER_SHUFFLES if shuffles_too else ""))
            self._try(source)
        elif agreed.seen is not None:
            if self._is_trying and not pays_clearly(self._to_beat, agreed.seen):
                self._measure_again(source, agreed.seen)
                return
            if self._is_trying:
                self.phase, self._is_trying = Phase.WATCHING, False
                if source.pool is not None:
                    source.pool.on_trial = False
                self._judge(agreed.seen, self._to_beat)
            elif self._tried is not None:
                self.record = with_rates(self.record, agreed.seen)
                self._judge(self._tried, agreed.seen)
            else:
                self.record = with_rates(self.record, agreed.seen)
                self._seen = (*self._seen, agreed.seen)
            self._decide(source, agreed.capacity)

    def _decide(self, source: SwitchingIterator, capacity: Capacity) -> None:
        move = decide(self._seen, capacity, self._failed, len(self._undecided))
        if isinstance(move, Settle):
            self.phase = Phase.DONE
            self._note("settled", move.why)
            if source.pool is not None and source.pool.knobs != self.in_force:
                source.hand_over(self._pool_in_force(source))
            return
        self._wanted, self.phase = move, Phase.CHECKING
        if self._check is None:
            self._check = BatchCheck(serial=not self.user.num_workers)
            self._note("watching", "checking that workers make the same batches")

    # ------------------------------------------------------------------ trials

    def _try(self, source: SwitchingIterator) -> None:
        """Switch to a pool with the wanted settings."""
        knobs = self._wanted
        move = LiveMove(self._settings(knobs), self._process.now_s(), batch=self.drawn)
        self._note("trying", f"trying {loader_settings(*knobs)}", moves=(*self.record.moves, move))
        self.phase, self._is_trying = Phase.TRYING, True
        self._window.begin(knobs, knobs.num_workers * knobs.prefetch_factor, self._to_beat.batches_per_s)
        self.stats.serving_workers = knobs.num_workers
        source.hand_over(self._pool_in_force(source))

    @property
    def _to_beat(self) -> Measurement:
        """The last measurement of the settings in force."""
        return next((one for one in reversed(self._seen) if one.knobs == self.in_force), best_of(self._seen))

    def _measure_again(self, source: SwitchingIterator, seen: Measurement) -> None:
        self.phase, self._is_trying, self._tried = Phase.WATCHING, False, seen
        self.record = with_outcome(self.record, "trying", seen)
        self._window.begin(self.in_force, self.in_force.num_workers * self.in_force.prefetch_factor, seen.batches_per_s)
        source.hand_over(self._pool_in_force(source))
        self._note_in_force()

    def _judge(self, trial: Measurement, again: Measurement) -> None:
        """Keep the trial's settings if they are faster than those in force, measured before and after the trial."""
        before, self._tried, tried = self._to_beat, None, loader_settings(*trial.knobs)
        paid = pays(before, trial, again)
        *others, now = at_pace_of(again, before, trial, self._seen)
        if paid is None and trial.knobs not in self._undecided:  # it may be tried once more
            self._undecided, self._seen = (*self._undecided, trial.knobs), tuple(others)
        else:
            self._seen = (*others, now)
        if paid:
            self.in_force = trial.knobs
            self.record = with_outcome(self.record, "kept", trial)
            figures = {"batches_per_s": now.batches_per_s, "wait_share": now.wait_share}
            self._note("watching", f"{tried} paid", settings=self._settings(trial.knobs), **figures)
            self._process.write(self.stats.where, self.record.settings)
            self._note_in_force()
        else:
            why = None if paid is False else pace_changed(before, again)
            self.record = with_outcome(self.record, "returned", trial, why)
            self._note("watching", f"{tried} did not pay{'' if why is None else f' for certain: {why}'}")

    def _make(self, source: SwitchingIterator, knobs: Knobs, metered: bool = True) -> LoaderPool:
        """A new pool; its patience depends on how long batches have taken so far."""
        self._made += 1
        generator = torch.Generator()
        if self._made == 1:
            generator.set_state(self._seed_state)
        else:
            generator.manual_seed((self._seed + SEED_STEP * self._made) % 2**63)
        batch_s = max(knobs.num_workers, 1) / best_of(self._seen).batches_per_s if self._seen else 0.0
        start_s = self._limits.spawn_s if starts_slowly(source.loader) else self._limits.batch_s
        patience_s = math.ceil(max(start_s, self._limits.batch_times * batch_s))
        meter = (
            partial(self._process.session.loaders.start_workers, stats=self.stats) if metered else lambda start: start()
        )
        own = knobs == self.user and metered
        # The data set of a script without workers lives in the training process.
        is_moved = knobs.num_workers and not self.user.num_workers
        loader = source.loader
        if is_moved:
            check = self._check
            loader = refusing(loader, self._process.exact, may_draw_from_own=check is not None and check.draws_from_own)
        repeats = knobs.num_workers > 0 and not metered
        return LoaderPool(loader, knobs, generator, self._iterate, meter, None if own else patience_s, repeats)

    # ------------------------------------------------------------------ when something is wrong

    def replace_failed(self, source: SwitchingIterator, pool: LoaderPool, error: Exception) -> LoaderPool:
        """The pool that replaces a failed one: with the best settings so far, or the script's own."""
        if (refused := reason_in(error)) is not None:
            self.leave_alone(refused)
            source.watch = None  # the batch that was refused has been made in the training process since
        elif pool.on_trial and self.phase is Phase.TRYING:
            pool.on_trial = False
            self._trial_failed(source, short(error))
            if is_of_data_set(error) and not self.user.num_workers:
                self.leave_alone(f"its data set works only in the training process ({short(error)})")
            else:
                self._report(source, failed=short(error))
        else:
            self.leave_alone(
                f"{loader_settings(*pool.knobs)} failed ({short(error)}): back to the script's own settings"
            )
        return self._make(source, self.in_force)

    def _trial_failed(self, source: SwitchingIterator, why: str) -> None:
        """Back to the settings in force. On the rank whose pool failed, it is replaced already."""
        self._is_trying = False
        self._failed = (*self._failed, self._wanted)
        self.record = with_outcome(self.record, "failed", None, why)
        self._note("watching", why)
        self._note_in_force()
        if source.pool is not None and source.pool.on_trial:
            source.hand_over(self._pool_in_force(source))

    def make_here(self, source: SwitchingIterator, indices: Any) -> tuple[Any, Any]:
        """Make a batch in the training process. Raises what the data set raises there."""
        pool = self._make(source, self.user._replace(num_workers=0))
        pool.serve(IndexQueue(iter([indices])))
        return pool.draw()

    def broke(self, error: Exception) -> None:
        """Tuning itself raised an error: the present pool stays."""
        self.phase = Phase.DONE
        self._note("settled", f"an internal error ended tuning ({short(error)})")
        with contextlib.suppress(Exception):
            if (ranks := self._process.ranks) is not None:
                ranks.write(self._process.report(self.stats, 0, self.user, Capacity(0.0), left_alone=self.record.why))

    def leave_alone(self, why: str) -> None:
        """Return to the script's own settings for good."""
        if self._is_trying or self._tried is not None:
            self.record = with_outcome(self.record, "failed", None, why)
        self.phase = Phase.DONE
        self._left_alone, self._is_trying, self._tried = True, False, None
        self.in_force = self.user
        found_others = self.record.settings != self.record.before
        self._note("left_alone", why, settings=self.record.before)
        if found_others:
            self._process.write(self.stats.where, None)
        self.stats.in_force, self.stats.serving_workers = {}, None

    # ------------------------------------------------------------------ what reports read

    def _settings(self, knobs: Knobs) -> Settings:
        """Settings as files and records have them. Whether workers persist stays the script's choice."""
        return Settings(
            num_workers=knobs.num_workers,
            prefetch_factor=knobs.prefetch_factor if knobs.num_workers else None,
            pin_memory=knobs.pin_memory,
            persistent_workers=self._persists if knobs.num_workers else None,
        )

    def _note_in_force(self) -> None:
        settings = self._settings(self.in_force)
        self.stats.in_force = {name: getattr(settings, name) for name in LOADER_SETTINGS}
        self.stats.in_force["persistent_workers"] = bool(settings.persistent_workers)
        self.stats.serving_workers = self.in_force.num_workers

    def _note(self, state: str, why: str, **more: Any) -> None:
        self.record = replace(self.record, state=state, why=why, **more)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _costs(self) -> Iterator[None]:
        """Count the time that tuning takes on the training thread."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.record = replace(self.record, cost_s=self.record.cost_s + time.perf_counter() - began_s)


def _length(source: SwitchingIterator) -> int | None:
    """The number of batches of a pass; None where its sampler has no length."""
    try:
        return len(source)
    except TypeError:
        return None
