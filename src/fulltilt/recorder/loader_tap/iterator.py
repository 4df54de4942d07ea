"""A loader's iterator with a meter on it: every wait is measured, every batch counted."""

from __future__ import annotations

import sys
import time
from typing import Any

from fulltilt.recorder.batches import count_samples
from fulltilt.recorder.loader_tap.drawing import Drawing
from fulltilt.recorder.loader_tap.tap import LoaderTap
from fulltilt.recorder.marks import Activity, BatchArrived, PassEnded, Point, WaitBegan
from fulltilt.recorder.rest import LONG_WAIT_NS

# Reading a thread's CPU clock is a system call: done for the first batches and then for every so many.
TIME_CPU_FIRST = 64
TIME_CPU_EVERY = 8
# After so many requests for one sample each that all brought a batch, the next ones will, too.
ASKED_IN_VAIN = 64
WAITS = {False: WaitBegan(False), True: WaitBegan(True)}


class TappedIterator:
    """A loader's iterator with a meter. Everything it does not know itself it asks its source."""

    def __init__(self, taps: Drawing, tap: LoaderTap, source: Any) -> None:
        self._taps = taps
        self._tap = tap
        self._first = True
        self.source = source

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() answers as it would without us
        return type(self.source)

    @property
    def workers(self) -> int:
        """How many workers the batches come from at this moment."""
        return int(getattr(self.source, "_num_workers", 0))

    def __iter__(self) -> TappedIterator:
        return self

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __next__(self) -> Any:
        taps, tap = self._taps, self._tap
        recorder = taps.recorder
        if not recorder.mine():
            return self._from_another_thread(recorder)
        evaluating = taps.evaluating(tap)
        if recorder.rest.on:
            if not evaluating and not self._first:
                return self.at_rest(recorder)
            recorder.wake()
        changed = evaluating != taps.was_evaluating
        taps.was_evaluating = evaluating
        taps.waiting_for = tap
        before = recorder.switch(Activity.NEXT, WAITS[evaluating], Point.EVAL if changed else Point.NONE)
        first, self._first = self._first, False
        workers = self.workers
        timed = first or tap.batches < TIME_CPU_FIRST or tap.batches % TIME_CPU_EVERY == 0
        cpu = time.thread_time() if timed else 0.0
        began = tap.waiting_since_s = time.perf_counter()
        try:
            batch = self.source.__next__()
        except StopIteration:
            tap.waiting_since_s = None
            tap.restart_s += time.perf_counter() - began
            tap.in_pass = False
            taps.was_evaluating = recorder.eval_mode
            recorder.switch(
                before, PassEnded(tap.loader_id, evaluating, workers), Point.EVAL if evaluating else Point.NONE
            )
            raise
        except BaseException:
            # Often Ctrl-C, because nothing comes any more: that wait is the loader's, too, and costs no CPU time.
            cpu_s = time.thread_time() - cpu if timed else 0.0
            self._note_wait(first and workers > 0, time.perf_counter() - began, cpu_s)
            recorder.switch(before)
            raise
        waited = time.perf_counter() - began
        self._note_wait(first and workers > 0, waited, time.thread_time() - cpu if timed else None)
        samples = self._count(batch)
        doubtful = evaluating and taps.gradients()
        fact = BatchArrived(tap.loader_id, samples, evaluating, first, workers, doubtful)
        recorder.switch(before, fact, Point.NONE if evaluating else Point.BATCH)
        if evaluating:
            tap.eval_batches += 1
            recorder.evaluation.drew(sys._getframe(1))
        else:
            taps.feeding = tap
            recorder.calibrate_if_asked(Point.BATCH)
        return batch

    def at_rest(self, recorder: Any) -> Any:
        """A batch that is only counted."""
        tap, rest = self._tap, recorder.rest
        began = time.perf_counter_ns()
        try:
            batch = self.source.__next__()
        except StopIteration:
            recorder.wake()
            tap.in_pass = False
            recorder.switch(recorder.activity, PassEnded(tap.loader_id, False, self.workers))
            raise
        except BaseException:
            tap.timed_wait_s += self._waited_at_rest(began)  # as in __next__
            recorder.wake()
            raise
        self._waited_at_rest(began)
        rest.draw(tap.loader_id, self._count(batch) or 0)
        return batch

    def _waited_at_rest(self, began_ns: int) -> float:
        ended_ns = time.perf_counter_ns()
        wait_s = (ended_ns - began_ns) * 1e-9
        self._tap.wait_s += wait_s
        if ended_ns - began_ns > LONG_WAIT_NS:
            self._taps.recorder.waited_at_rest(began_ns, ended_ns)
        return wait_s

    def _note_wait(self, first: bool, wait_s: float, cpu_s: float | None) -> None:
        tap = self._tap
        tap.waiting_since_s = None
        if first and tap.passes == 1:
            tap.first_wait_s += wait_s
        elif first:
            tap.restart_s += wait_s
        else:
            tap.wait_s += wait_s
            if cpu_s is not None:
                tap.timed_wait_s += wait_s
                tap.timed_cpu_s += cpu_s

    def _count(self, batch: Any) -> int | None:
        tap = self._tap
        samples = count_samples(batch, tap.described.get("batch_size") or tap.asked_for)
        tap.batches += 1
        if tap.asked_for is not None:
            tap.asked_in_vain = 0 if samples == tap.asked_for else tap.asked_in_vain + 1
            if tap.asked_in_vain == ASKED_IN_VAIN:
                tap.asked_for = None  # what one request brings is a batch, whose own shape is quicker to read
        if samples is not None:
            tap.samples += samples
            tap.counted = True
        tap.inspect(batch)
        return samples

    def _from_another_thread(self, recorder: Any) -> Any:
        """A prefetching thread of the user's draws: count the batch, but the training thread did not wait for it.

        One that evaluates beside the training takes none of its time.
        """
        batch = self.source.__next__()
        if recorder.active:
            samples = self._count(batch)
            if self._taps.evaluating(self._tap):
                self._tap.eval_batches += 1
            else:
                self._taps.feeding = self._tap
                self._taps.drawn_elsewhere = True
                recorder.note(BatchArrived(self._tap.loader_id, samples, False, False, 1))
        return batch
