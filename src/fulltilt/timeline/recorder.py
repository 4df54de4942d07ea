"""The recorder of one process: takes marks on the training thread, makes a run's records of them on another.

The training thread only reads the clock, records an event where there is a GPU, and appends a tuple. A daemon thread,
the observer, looks at the training thread's stack 100 times a second (at first 200), turns marks into spans and writes
the run folder.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from fulltilt import captures
from fulltilt.records import Span
from fulltilt.timeline.attribution import attribute
from fulltilt.timeline.behind_steps import BehindSteps
from fulltilt.timeline.clock import CudaClock
from fulltilt.timeline.interpreter_lock import LockTurns, wake_on_time
from fulltilt.timeline.looks import Looks
from fulltilt.timeline.marks import Activity, BookedApart, Finished, Point, Rested
from fulltilt.timeline.notes import RankNotes
from fulltilt.timeline.rank_files import RankFiles
from fulltilt.timeline.rest import LONG_STEP_NS, Rest, Usual, plan
from fulltilt.timeline.shelves import SHELF
from fulltilt.timeline.spans import WarmUp
from fulltilt.timeline.tiles import TileBuilder
from fulltilt.timeline.way_in import WayIn

DRAIN_EVERY_S = 0.2
WRITE_EVERY_S = 1.0
# A killed process loses what it has not written: a second, or this part of what was seen where that is less.
LOST_SHARE = 0.1
# A calibrating delay is queued at this step and then each time there are four times as many, if the GPU is not behind.
# Each costs about a step's worth of host work, so that a run of 100 steps loses 2 % and one of 1,000 a third of that.
# Until one has taught how long the GPU works, they come at twice as many.
FIRST_CALIBRATION = 12
CALIBRATE_AGAIN, CALIBRATE_UNTIL_KNOWN = 4, 2
LEAD = 1.3
LONGEST_DELAY_S = 0.2
NS = 1e-9


class Recorder:
    """Records one process of a training job into a run folder."""

    def __init__(self, folder: Path, t0_ns: int, notes: RankNotes) -> None:
        self.folder = folder
        self.notes = notes
        self.activity = Activity.USER
        self.thread_id = threading.main_thread().ident
        self.active = True
        self.training = False
        self.eval_mode = False
        self.clock: CudaClock | None = None
        self.calibrating = False
        self.profiling = False
        self.rest = Rest()
        self.way_in = WayIn()
        self._t0_ns = t0_ns
        self._marks: deque[tuple[Any, ...]] = deque()
        self._builder = TileBuilder(t0_ns)
        self._warm_up = WarmUp()
        self._usual = Usual()
        self._looks = Looks(self)
        self.left = self.left_after = Activity.USER
        self._out: RankFiles | None = None
        self._ready: list[Span] = []
        self.last_switch_ns = self.step_ns = self.previous_step_ns = time.perf_counter_ns()
        self._calibrate_at = FIRST_CALIBRATION
        self._calibrate = False
        self._calibrate_from = Point.NONE
        self._delay_s = 0.0
        self._again_delay_s = 0.0
        self._lock_turns = LockTurns()
        self._stop = threading.Event()
        self._flush: threading.Event | None = None
        self.pid = os.getpid()
        self._problems = 0
        self._thread = threading.Thread(target=self._observe, name="fulltilt-observer", daemon=True)

    # ------------------------------------------------------------------ on the training thread

    def ensure_started(self) -> None:
        """Begin to observe. Processes that never train are never observed."""
        if self._thread.ident is not None or not self.active:
            return
        self._lock_turns.share()
        os.register_at_fork(after_in_child=self._disown)
        self._thread.start()

    def _disown(self) -> None:
        """A forked child (a loader worker) is not the job: it must not record."""
        self.active = False

    def mine(self) -> bool:
        """Whether the calling thread is the one that trains."""
        return self.active and threading.get_ident() == self.thread_id

    def adopt(self) -> None:
        """The calling thread is the one that trains."""
        self.thread_id = threading.get_ident()

    def switch(self, activity: Activity, fact: Any = None, point: Point = Point.NONE) -> Activity:
        """From now on the training thread does ``activity``. Returns what it did before."""
        if self.way_in.learning and self.training and not self.notes.evaluating(self.eval_mode):
            self.way_in.see(activity, sys._getframe(1))
        event = self.clock.record() if point and self.clock is not None else None
        now = time.perf_counter_ns()
        self._marks.append((now, activity, fact, point, event))
        self.last_switch_ns = now
        before = self.activity
        if before is not activity:
            self.left_after, self.left = self.left, before
            self.activity = activity
        return before

    def stepped(self) -> None:
        """An optimizer call has ended. After a burst of short steps the recorder rests."""
        self.previous_step_ns, self.step_ns = self.step_ns, self.last_switch_ns
        rest = self.rest
        rest.measured()
        if rest.plan is not None and rest.awake_calls >= rest.plan.measured_calls:
            if self.profiling or self.calibrating or self._calibrate:
                return
            self.switch(Activity.REST)
            rest.begin(self.last_switch_ns)

    def stepped_at_rest(self) -> None:
        """An optimizer call has ended that was not measured."""
        self._passed_at_rest(time.perf_counter_ns())
        self.rest.calls += 1
        if self.rest.plan is None or self.rest.calls >= self.rest.plan.rested_calls:
            self.wake()

    def wake(self) -> None:
        """Measure again, because the rest is over or because something out of the ordinary happens."""
        rest = self.rest
        if rest.on:
            self._passed_at_rest(time.perf_counter_ns())
            rest.end()
            self.switch(Activity.USER, Rested(rest.calls, rest.drawn), Point.STEP)

    def waited_at_rest(self, began_ns: int, ended_ns: int) -> None:
        """Book a long wait for data as it is."""
        self._passed_at_rest(began_ns)
        self._book_apart(Activity.NEXT, began_ns, ended_ns)

    def _passed_at_rest(self, now_ns: int) -> None:
        """A step at rest, or its part before a long wait, has passed. A long one is booked by what the looks saw.

        Not on a GPU: there it is not the host's time that is divided.
        """
        if now_ns - self.rest.booked_ns > LONG_STEP_NS and self.clock is None:
            self._book_apart(Activity.USER, self.rest.booked_ns, now_ns)
        self.rest.booked_ns = now_ns

    def _book_apart(self, activity: Activity, began_ns: int, ended_ns: int) -> None:
        apart = BookedApart(SHELF[activity], ended_ns - began_ns)
        self._marks.append((began_ns, activity, None, Point.NONE, None))
        self._marks.append((ended_ns, Activity.REST, apart, Point.NONE, None))
        self.rest.booked_ns = ended_ns

    def note(self, fact: Any) -> None:
        """Leave a fact behind from any thread, without a change of activity."""
        self._marks.append((time.perf_counter_ns(), None, fact, Point.NONE, None))

    def trains_on_gpu(self, torch: Any) -> None:
        """Start the GPU's clock: called once, between two steps, when the first optimizer has CUDA parameters."""
        if self.clock is None:
            self.clock = CudaClock(torch)

    def calibrate_if_asked(self, point: Point) -> None:
        """Give the host a lead at this point of a step when the observer has asked for it."""
        if point is Point.BATCH:
            self.calibrating = False
        if self._calibrate and self._calibrate_from is point and self.clock is not None and not self.profiling:
            self._calibrate = False
            self.calibrating = True
            self._delay(self._delay_s)

    def lost_its_lead(self) -> None:
        """A blocking call used up the lead while calibrating: restore it."""
        self._delay(self._again_delay_s)

    def _delay(self, seconds: float) -> None:
        assert self.clock is not None
        self.clock.delay(seconds)
        self.switch(self.activity, None, Point.DELAY)

    def finish(self) -> None:
        """The job is over: write everything. Safe to call twice, and from an exit handler."""
        if not self.active or os.getpid() != self.pid:
            return
        self.wake()
        self.switch(Activity.USER, Finished())
        self.active = False
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)
        self._drain(patience_s=5.0)
        self.notes.poll()
        self._write_spans(final=True)
        self._write_record(final=True)
        if self._out is not None:
            self._out.close()

    def flush(self) -> None:
        """Have everything written so far, and go on recording. Returns when that is done; not for the observer."""
        if self._thread.is_alive():
            flushed = self._flush = threading.Event()
            flushed.wait()

    # ------------------------------------------------------------------ on the observer thread

    @property
    def behind_steps(self) -> BehindSteps:
        """What the marks so far tell of the stretches behind steps."""
        return self._builder.behind_steps

    def _observe(self) -> None:
        wake_on_time()
        began = time.monotonic()
        next_drain = next_write = next_record = began + DRAIN_EVERY_S
        jitter = Random()  # our own: the job's random numbers are the job's
        ruins_nothing = False
        while True:
            # Never in step with the job: looks at a fixed interval would always meet a 10 ms step at the same place.
            pause_s = self._looks.every_s * (0.5 + jitter.random())
            self._lock_turns.begin_wait()
            due_ns = time.perf_counter_ns() + int(pause_s * 1e9)
            time.sleep(pause_s)  # waiting for an Event with a time limit takes the interpreter lock twice as long
            self._lock_turns.end_wait()
            if self._stop.is_set() or os.getpid() != self.pid:
                return
            try:
                ruins_nothing = ruins_nothing or (self.clock is not None and captures.leave_alone())
                self._looks.take(due_ns)
                now = time.monotonic()
                if now >= next_drain:
                    next_drain = now + DRAIN_EVERY_S
                    self._lock_turns.share()
                    self._drain()
                    self.notes.poll()
                if now >= next_write:
                    next_write = now + min(max(LOST_SHARE * (now - began), DRAIN_EVERY_S), WRITE_EVERY_S)
                    # Before the first look at the user's own time nobody could say what that went into.
                    if not self._looks.none_yet or now - began > WRITE_EVERY_S:
                        self._write_spans()
                if now >= next_record:
                    next_record = now + WRITE_EVERY_S
                    self.notes.observer_s = time.thread_time()
                    self._write_record(final=False)
                if self._flush is not None:
                    self._drain()
                    self._write_spans()
                    self._write_record(final=False)
                    self._flush.set()
                    self._flush = None
            except Exception as error:
                self._problem(error)

    def _problem(self, error: Exception) -> None:
        self._problems += 1
        self.notes.remark(f"observer: {type(error).__name__}: {error}")
        if self._problems > 100:
            self._stop.set()

    def _drain(self, patience_s: float = 0.0) -> None:
        """Turn the marks whose events have been reached into tiles."""
        deadline = time.monotonic() + patience_s
        marks, clock, builder = self._marks, self.clock, self._builder
        while marks:
            raw = marks[0]
            reached = None
            if raw[4] is not None and clock is not None:
                reached = clock.resolve(raw[4], raw[0])
                if reached is None:
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(0.001)
                    continue
            marks.popleft()
            builder.feed(raw, reached)
        self.notes.steps = builder.steps
        self._plan_calibration()
        if builder.closed:
            tile = builder.closed[-1]
            step_s = (tile.t1_ns - tile.t0_ns) * NS / max(tile.steps, 1)
            self.rest.plan = plan(builder.steps, builder.calls, step_s, self.notes.scaler)

    def _plan_calibration(self) -> None:
        gpu, tiles = self._builder.gpu, self._builder.closed
        if gpu is None or self._calibrate or self.notes.steps < self._calibrate_at or not tiles:
            return
        if "rest" in tiles[-1].shelves.time:
            return
        self._calibrate_at = self.notes.steps * (CALIBRATE_AGAIN if gpu.work.knows_a_step else CALIBRATE_UNTIL_KNOWN)
        queueing_s = tiles[-1].queueing_ns * NS
        behind_s = gpu.lag_ns * NS
        if behind_s < queueing_s < LONGEST_DELAY_S / LEAD:
            # The driver's queue holds about a thousand kernels: every other time the lead is given for backward alone.
            self._calibrate_from = Point.BATCH if self._calibrate_from is not Point.BATCH else Point.BACKWARD
            self._delay_s = LEAD * queueing_s
            # Each blocking call of a step takes the lead away. Between two of them there is less to queue. Behind the
            # last one comes the optimizer, which may need a longer lead: that leaves some doubt (see gpu_time).
            self._again_delay_s = 2 * LEAD * queueing_s / (1 + self.notes.syncs // self.notes.steps)
            self._calibrate = True

    def _attribute(self) -> None:
        tiles = self._builder.closed
        if not tiles:
            return
        seen, seen_apart = self._looks.splits()
        in_backward = self._looks.backward.split()
        exposed_s = self.notes.exposed_communication_s()
        for tile in tiles:
            # What follows the last step is no step: it divides as what takes long.
            here = seen if tile.steps else seen_apart
            attributed = attribute(tile, here, seen_apart, self._usual, exposed_s, in_backward)
            self.notes.launch_s += attributed.launch_s
            if tile.gpu and tile.steps:
                self.notes.gpu_busy_s += attributed.buckets.compute_s
                self.notes.gpu_steps += tile.steps
            span = Span(
                t0_s=(tile.t0_ns - self._t0_ns) * NS,
                t1_s=(tile.t1_ns - self._t0_ns) * NS,
                first_step=self.notes.steps_attributed,
                steps=tile.steps,
                batches=tile.batches,
                samples=tile.samples,
                buckets=attributed.buckets,
                epoch=tile.epoch,
                skipped_steps=tile.skipped,
                step_max_s=tile.step_max_ns * NS if tile.steps else None,
                data_wait_max_s=tile.data_wait_max_ns * NS,
                phases=attributed.phases if tile.steps else None,
            )
            self.notes.steps_attributed += tile.steps
            self._ready.extend(self._warm_up.add(span))
        tiles.clear()
        self._looks.begin_window()

    def _write_spans(self, final: bool = False) -> None:
        self._attribute()
        if not self.notes.trained(self._builder):
            return
        if final:
            self._ready.extend(self._warm_up.release())
        if self._out is None:
            self.notes.learn_rank()
            self._out = RankFiles.claim(self.folder, self.notes.rank)
            self._write_record(final=False)  # first: spans without their rank's record cannot be read
        ready, self._ready = self._ready, []
        self._out.write(ready)

    def _write_record(self, final: bool) -> None:
        if self._out is None:
            return
        now_s = (time.perf_counter_ns() - self._t0_ns) * NS
        on_gpu = self.clock is not None
        stretch = self.rest.not_stood_for
        record = self.notes.record(self._out.stream, now_s, final, self._builder, on_gpu, stretch)
        self._out.write_record(record if final else replace(record, under_way=self._under_way()))

    def _under_way(self) -> Span | None:
        tile = self._builder.under_way(time.perf_counter_ns())
        if tile is None:
            return None
        _, seen_apart = self._looks.splits()
        buckets = attribute(tile, seen_apart, seen_apart, Usual(), 0.0, self._looks.backward.split()).buckets
        t0_s, t1_s = ((ns - self._t0_ns) * NS for ns in (tile.t0_ns, tile.t1_ns))
        return Span(t0_s, t1_s, self._builder.steps, 0, 0, None, buckets, tile.epoch)
