"""Live tuning of an IterableDataset without workers: tries one worker, from one pass to the next.

One worker gives the same batches in the same order, unless the data set behaves differently in a worker or from pass to
pass: so two passes of the script and the worker's must begin alike. More workers would change the order, and a pass
cannot move to another process halfway. The training process never draws extra batches, since that would change state
that the data set keeps in its class or module.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal

from fulltilt.recorder.loaders import LoaderStats
from fulltilt.records import LiveMove, LiveRecord, Settings
from fulltilt.tuning.live.batch_check import Pickled, file_positions, kept_generators, reason_against
from fulltilt.tuning.live.controller import at_pace_of, pays
from fulltilt.tuning.live.limits import LiveLimits
from fulltilt.tuning.live.loader_pool import copy_of, knobs_of
from fulltilt.tuning.live.measurement import (
    Arrival,
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
        self._process = process
        self._workers = 0
        self._own: Seen | None = None
        self._tried: Seen | None = None  # the pass with a worker
        self._began: list[bytes] | None = None  # the first batches of the script's own pass
        self._last: StreamPass | None = None

    def begin(self, loader: Any, iterate: Callable[[Any], Any]) -> Any:
        """The iterator of a new pass; ``iterate`` is torch's own ``DataLoader.__iter__``."""
        last = self._last
        if last is not None and self.record.state in ("watching", "trying") and self.stats.trains:
            self._judge(loader, last, iterate)
        if self._workers:
            loader = _with_a_worker(loader)
        source = self._process.session.loaders.start_workers(partial(iterate, loader), self.stats)
        self._last = StreamPass(source, loader, looks=self.record.state == "watching")
        return self._last

    def _judge(self, loader: Any, last: StreamPass, iterate: Callable[[Any], Any]) -> None:
        """Decide by the last pass whether the next one has a worker."""
        if (why := reason_against(loader) or last.problem or self._process.reason_of_job(streams=True)) is not None:
            self._settle("left_alone", why, 0)
        elif (seen := last.seen(self._process.limits)) is None:
            return  # it was left early, or too short
        elif self._own is None:
            self.record = with_rates(self.record, seen)
            earlier, self._began = self._began, last.began
            if seen.wait_share <= self._process.limits.enough_wait_share:
                self._settle("settled", "the loader is no longer the limit", 0)
            elif earlier is None:
                return
            elif earlier != last.began:
                self._settle("left_alone", DIFFERS, 0)
            elif _begins_in_a_worker(loader, iterate) != last.began:
                self._settle("left_alone", COMES_OUT_DIFFERENT, 0)
            else:
                self._own = seen
                move = LiveMove(Settings(num_workers=1), self._process.now_s())
                self.record = replace(self.record, state="trying", why="trying 1 worker", moves=(move,))
                self._workers = self.stats.serving_workers = 1
        elif self._tried is None:
            self._tried = seen
            self.record = with_outcome(self.record, "trying", seen)
            self._workers = self.stats.serving_workers = 0
        else:
            self._end_trial(self._own, self._tried, seen)

    def _end_trial(self, own: Seen, seen: Seen, again: Seen) -> None:
        paid = pays(own, seen, again, self._process.limits)
        why = pace_changed(own, again) if paid is None else None
        self.record = with_rates(with_outcome(self.record, "kept" if paid else "returned", seen, why), again)
        if paid:
            *_, now = at_pace_of(again, own, seen, (own,))
            self.record = replace(self.record, batches_per_s=now.batches_per_s, wait_share=now.wait_share)
        outcome = "it is undecided whether 1 worker pays" if why else f"1 worker {'paid' if paid else 'did not pay'}"
        self._settle("settled", f"{outcome}; more would change the order", int(bool(paid)))
        if paid:
            self._process.write(self.stats.where, self.record.settings)

    def _settle(self, state: Literal["settled", "left_alone"], why: str, workers: int) -> None:
        self._workers = self.stats.serving_workers = workers
        self.stats.in_force = {"num_workers": workers} if workers else {}
        self.record = replace(self.record, state=state, why=why, settings=Settings(num_workers=workers))


def _with_a_worker(loader: Any) -> Any:
    changed = copy_of(loader)
    vars(changed).update(num_workers=1, prefetch_factor=2, persistent_workers=False, _iterator=None)
    return changed


def _begins_in_a_worker(loader: Any, iterate: Callable[[Any], Any]) -> list[bytes]:
    """The first batches that a worker makes. Random generators are restored."""
    with kept_generators(loader.generator):
        return [Pickled(batch).digest for batch in islice(iterate(_with_a_worker(loader)), COMPARED)]


class StreamPass:
    """One pass. ``problem``: why a worker could not make its batches."""

    def __init__(self, source: Any, loader: Any, looks: bool) -> None:
        self.problem: str | None = None
        self.began: list[bytes] = []  # the first batches
        self._source, self._knobs = source, knobs_of(loader)
        self._dataset = loader.dataset
        self._state = self._state_now() if looks else None
        self._arrivals: list[Arrival] = []
        self._left_s: float | None = None
        self._has_ended = False

    def __iter__(self) -> StreamPass:
        return self

    def __getattr__(self, name: str) -> Any:  # the loader's timer, and scripts, ask torch's iterator
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def __next__(self) -> Any:
        asked_s = time.perf_counter()
        try:
            batch = next(self._source)
        except StopIteration:
            self._has_ended = True
            if self._state is not None:
                self._compare_with(*self._state)
            raise
        came_s = time.perf_counter()
        if self._state is not None and len(self.began) < COMPARED:
            self.began.append(Pickled(batch).digest)
        if len(self._arrivals) < MOST_ARRIVALS:
            busy_s = 0.0 if self._left_s is None else asked_s - self._left_s
            self._arrivals.append(Arrival(came_s - asked_s, busy_s))
        self._left_s = time.perf_counter()
        return batch

    def seen(self, limits: LiveLimits) -> Seen | None:
        """The rate of the pass; None where it was left early or is too short. Skips warm-up steps."""
        skipped = 0 if self._knobs.num_workers else limits.warm_up_batches
        return summarize(self._knobs, self._arrivals[skipped:], limits) if self._has_ended else None

    def _compare_with(self, digest: bytes, positions: dict[tuple[int, str], int]) -> None:
        digest_now, positions_now = self._state_now()
        moved = dict(positions_now.items() ^ positions.items())
        if self.problem is None and moved:
            self.problem = f"a file that it reads stays open from pass to pass ({next(iter(moved))[1]})"
        elif self.problem is None and digest_now != digest:
            self.problem = CARRIED_OVER

    def _state_now(self) -> tuple[bytes, dict[tuple[int, str], int]]:
        """The state that a pass may change: of the data set, its random generators, and files that stay open."""
        pickled = Pickled(self._dataset, is_batch=False, with_generators=True)
        if pickled.problem is not None:
            self.problem = f"its data set holds what a worker cannot share ({pickled.problem})"
        return pickled.digest, file_positions()
