"""Live tuning of an IterableDataset without workers: tries one worker, from one pass to the next.

One worker gives the same batches in the same order, unless the data set behaves differently in a worker or from pass to
pass: so two passes of the script and the worker's must begin alike. More workers would change the order, and a pass
cannot move to a worker halfway. The training process never draws extra batches, since that would change state that the
data set keeps in its class or module; only where a worker fails it makes its batches again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from fulltilt.recorder.loaders import LoaderStats
from fulltilt.records import LiveMove, LiveRecord, Settings
from fulltilt.tuning.live.batch_check import Pickled, file_positions, kept_generators, reason_against, short
from fulltilt.tuning.live.controller import at_pace_of, pays
from fulltilt.tuning.live.loader_pool import IndexQueue, LoaderPool, knobs_of, sampler_of
from fulltilt.tuning.live.measurement import (
    Arrival,
    Knobs,
    Seen,
    pace_changed,
    summarize,
    with_outcome,
    with_rates,
)
from fulltilt.tuning.live.process import TunedProcess

CARRIED_OVER = "what its data set holds changes as it is read, and a worker would not carry it into the next pass"
COMES_OUT_DIFFERENT = "its batches come out different in a worker, or in another order"
DIFFERS = "its passes begin with different batches, and a worker would not carry that into the next pass"
# The first batches that are compared before a worker makes a whole pass.
COMPARED = 4
# The rate of a pass is taken from at most this many batches.
MOST_ARRIVALS = 4096


class StreamTuner:
    """Measures a pass without a worker, one with a worker and one without again; keeps what pays."""

    def __init__(self, process: TunedProcess, stats: LoaderStats) -> None:
        self.stats = stats
        own = Settings(num_workers=0)
        self.record = LiveRecord(
            stats.loader_id, "watching", "a streamed data set is tuned from pass to pass", own, own
        )
        self.process = process
        self._workers = 0
        self._own: Seen | None = None
        self._tried: Seen | None = None  # the pass with a worker
        self._began: list[bytes] = []  # the first batches of the script's own pass
        self._last: tuple[Seen | None, list[bytes]] | None = None  # of the last pass that was not left early

    def begin(self, loader: Any, iterate: Callable[[Any], Any]) -> Any:
        """The iterator of a new pass; ``iterate`` is torch's own ``DataLoader.__iter__``."""
        last, self._last = self._last, None
        if last is not None and self.record.state in ("watching", "trying") and self.stats.trains:
            try:
                self._judge(loader, *last, iterate)
            except Exception as error:
                if os.environ.get("FULLTILT_DEBUG"):
                    raise
                self.leave_alone(f"an internal error ended tuning ({short(error)})")
        start = self.process.session.loaders.start_workers
        own = partial(start, partial(iterate, loader), self.stats)
        pool = self._begin_pool(loader, iterate, partial(start, stats=self.stats)) if self._workers else None
        return StreamPass(self, loader, own, pool)

    def pass_ended(self, seen: Seen | None, began: list[bytes]) -> None:
        """All batches of a pass were given."""
        self._last = seen, began

    def leave_alone(self, why: str) -> None:
        """Return to the script's own settings for good."""
        if self.record.state == "trying":
            self.record = with_outcome(self.record, "failed", None, why)
        elif self._workers:
            self.process.write(self.stats.where, None)
        self._settle("left_alone", why, 0)

    def _judge(self, loader: Any, seen: Seen | None, began: list[bytes], iterate: Callable[[Any], Any]) -> None:
        """Decide by the last pass whether the next one has a worker."""
        if (why := reason_against(loader) or self.process.reason_of_job(streams=True)) is not None:
            self.leave_alone(why)
        elif seen is None:
            return  # it was too short
        elif self._own is None:
            self.record = with_rates(self.record, seen)
            earlier, self._began = self._began, began
            if seen.wait_share <= self.process.limits.enough_wait_share:
                self._settle("settled", "the loader is no longer the limit", 0)
            elif not earlier:
                return
            elif earlier != began:
                self.leave_alone(DIFFERS)
            elif (why := self._differs_in_a_worker(loader, iterate, began)) is not None:
                self.leave_alone(why)
            else:
                self._own = seen
                move = LiveMove(Settings(num_workers=1), self.process.now_s())
                self.record = replace(self.record, state="trying", why="trying 1 worker", moves=(move,))
                self._workers = self.stats.serving_workers = 1
        elif self._tried is None:
            self._tried = seen
            self.record = with_outcome(self.record, "trying", seen)
            self._workers = self.stats.serving_workers = 0
        else:
            self._end_trial(self._own, self._tried, seen)

    def _begin_pool(self, loader: Any, iterate: Callable[[Any], Any], start: Callable[[Any], Any]) -> LoaderPool:
        """One worker, seeded as torch would; as ``iter(loader)``, this draws once from the loader's generator."""
        generator = torch.Generator()
        generator.set_state((loader.generator or torch.default_generator).get_state())
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        limits, knobs = self.process.limits, knobs_of(loader)._replace(num_workers=1)
        batch_s = 1 / self._own.batches_per_s if self._own is not None else 0.0
        patience_s = max(limits.batch_s, limits.batch_times * batch_s)
        pool = LoaderPool(loader, knobs, generator, iterate, start, patience_s)
        pool.serve(IndexQueue(iter(sampler_of(loader))))
        return pool

    def _differs_in_a_worker(self, loader: Any, iterate: Callable[[Any], Any], began: list[bytes]) -> str | None:
        """Why a worker's pass does not begin with these batches; None where it does. Random generators are restored."""
        pool = None
        try:
            with kept_generators(loader.generator):
                pool = self._begin_pool(loader, iterate, lambda start: start())
            same = all(Pickled(pool.draw()[1]).digest == batch for batch in began)
            return None if same else COMES_OUT_DIFFERENT
        except Exception as error:
            error.__traceback__ = None  # it would hold the pool
            return f"a worker cannot make its batches ({short(error)})"
        finally:
            if pool is not None:
                pool.retire()

    def _end_trial(self, own: Seen, seen: Seen, again: Seen) -> None:
        paid = pays(own, seen, again)
        why = pace_changed(own, again) if paid is None else None
        self.record = with_rates(with_outcome(self.record, "kept" if paid else "returned", seen, why), again)
        if paid:
            *_, now = at_pace_of(again, own, seen, (own,))
            self.record = replace(self.record, batches_per_s=now.batches_per_s, wait_share=now.wait_share)
        outcome = "it is undecided whether 1 worker pays" if why else f"1 worker {'paid' if paid else 'did not pay'}"
        self._settle("settled", f"{outcome}; more would change the order", int(bool(paid)))
        if paid:
            self.process.write(self.stats.where, self.record.settings)

    def _settle(self, state: Literal["settled", "left_alone"], why: str, workers: int) -> None:
        self._workers = self.stats.serving_workers = workers
        self.stats.in_force = {"num_workers": workers} if workers else {}
        self.record = replace(self.record, state=state, why=why, settings=Settings(num_workers=workers))


class StreamPass:
    """One pass, from a pool with a worker or from torch's own iterator, which ``own`` makes.

    The tuner learns how it went when all batches were given. Where the worker fails, the training process makes the
    pass again up to there, and goes on.
    """

    def __init__(self, tuner: StreamTuner, loader: Any, own: Callable[[], Any], pool: LoaderPool | None) -> None:
        self._tuner, self._loader, self._own, self._pool = tuner, loader, own, pool
        self._state = self._state_now() if tuner.record.state == "watching" else None
        self._source: Any = own() if pool is None else None
        self._given = 0
        self._began: list[bytes] = []  # the first batches
        self._arrivals: list[Arrival] = []
        self._left_s: float | None = None

    def __iter__(self) -> StreamPass:
        return self

    @property
    def _num_workers(self) -> int:  # torch's name: the loader's timer reads it
        return 0 if self._pool is None else 1

    def __getattr__(self, name: str) -> Any:  # scripts ask torch's iterator
        pool = vars(self).get("_pool")
        return getattr(vars(self).get("_source") if pool is None else pool.iterator, name)

    def __len__(self) -> int:
        return len(sampler_of(self._loader))

    def __next__(self) -> Any:
        asked_s = time.perf_counter()
        try:
            batch = self._draw()
        except StopIteration:
            self._end()
            raise
        came_s = time.perf_counter()
        self._given += 1
        if self._state is not None and len(self._began) < COMPARED:
            self._began.append(Pickled(batch).digest)
        if len(self._arrivals) < MOST_ARRIVALS:
            busy_s = 0.0 if self._left_s is None else asked_s - self._left_s
            self._arrivals.append(Arrival(came_s - asked_s, busy_s))
        self._left_s = time.perf_counter()
        return batch

    def _draw(self) -> Any:
        if self._pool is not None:
            try:
                return self._pool.draw()[1]
            except StopIteration:
                raise
            except Exception as error:
                error.__traceback__ = None  # it would hold the pool
                self._tuner.leave_alone(f"1 worker failed ({short(error)})")
                self._pool.retire()
                self._pool = None
            with kept_generators(self._loader.generator):
                self._source = self._own()
                for _ in range(self._given):
                    next(self._source)
        return next(self._source)

    def _end(self) -> None:
        """Hold neither data set nor worker any longer, and report."""
        if self._state is not None:
            self._compare_with(*self._state)
        limits, workers = self._tuner.process.limits, self._num_workers
        skipped = 0 if workers else limits.warm_up_batches
        self._tuner.pass_ended(summarize(Knobs(workers), self._arrivals[skipped:], limits), self._began)
        if self._pool is not None:
            self._pool.retire()
        self._source, self._pool = iter(()), None

    def _compare_with(self, digest: bytes, positions: dict[tuple[int, str], int]) -> None:
        digest_now, positions_now = self._state_now() or self._state or (b"", {})
        moved = dict(positions_now.items() ^ positions.items())
        if self._tuner.record.state != "watching":
            return
        if moved:
            self._tuner.leave_alone(f"a file that it reads stays open from pass to pass ({next(iter(moved))[1]})")
        elif digest_now != digest:
            self._tuner.leave_alone(CARRIED_OVER)

    def _state_now(self) -> tuple[bytes, dict[tuple[int, str], int]] | None:
        """The state that a pass may change: of the data set, its random generators, and files that stay open."""
        pickled = Pickled(self._loader.dataset, is_batch=False, with_generators=True)
        try:
            if pickled.problem is None:
                return pickled.digest, file_positions()
            why = f"its data set holds what a worker cannot share ({pickled.problem})"
        except Exception as error:
            why = f"its open files are not known ({short(error)})"
        self._tuner.leave_alone(why)
        return None
