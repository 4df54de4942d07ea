"""The recorder of one process: takes marks on the training thread, makes a run's records of them on another.

The training thread only reads the clock, records an event where there is a GPU, and appends a tuple. A daemon thread,
the observer, looks at the training thread's stack about 100 times a second, turns marks into spans and writes the run
folder.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from random import Random
from typing import Any

from fulltilt.records import Span
from fulltilt.timeline.attribution import attribute
from fulltilt.timeline.clock import CudaClock
from fulltilt.timeline.loader_tap import TappedIterator
from fulltilt.timeline.marks import Activity, Finished, Point, Rested
from fulltilt.timeline.notes import RankNotes
from fulltilt.timeline.rank_files import RankFiles
from fulltilt.timeline.rest import Rest, Usual, plan
from fulltilt.timeline.spans import WarmUp
from fulltilt.timeline.stacks import look
from fulltilt.timeline.tiles import TileBuilder
from fulltilt.timeline.way_in import WayIn

LOOK_EVERY_S = 0.01
DRAIN_EVERY_S = 0.2
WRITE_EVERY_S = 1.0
# The observer asks for the interpreter lock; main code that holds it gives it up after this long. Python's 5 ms would
# let samples slip from short stretches of Python code into the torch call behind them.
SWITCH_INTERVAL_S = 0.0001
# A look is late when it had to wait for the interpreter lock.
LATE_NS = 300_000
# A window needs this many looks before its own split is trusted over that of the whole run.
ENOUGH_LOOKS = 20
# A calibrating delay is queued at this step and then each time there are four times as many, if the GPU is not behind.
# Each costs about a step's worth of host work, so that a run of 100 steps loses 2 % and one of 1,000 a third of that.
FIRST_CALIBRATION = 12
CALIBRATE_AGAIN = 4
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
        self._window: dict[str, float] = {}
        self._overall: dict[str, float] = {}
        self._window_looks = 0
        self._late: dict[str, float] = {}
        self._left = Activity.USER
        self._out: RankFiles | None = None
        self._ready: list[Span] = []
        self._last_look_ns = time.perf_counter_ns()
        self._last_switch_ns = self._last_look_ns
        self._calibrate_at = FIRST_CALIBRATION
        self._calibrate = False
        self._calibrate_from = Point.NONE
        self._delay_s = 0.0
        self._again_delay_s = 0.0
        self._stop = threading.Event()
        self.pid = os.getpid()
        self._problems = 0
        self._thread = threading.Thread(target=self._observe, name="fulltilt-observer", daemon=True)

    # ------------------------------------------------------------------ on the training thread

    def ensure_started(self) -> None:
        """Begin to observe. Processes that never train are never observed."""
        if self._thread.ident is not None or not self.active:
            return
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
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
        self._last_switch_ns = now
        before = self._left = self.activity
        self.activity = activity
        return before

    def stepped(self) -> None:
        """An optimizer call has ended. After a burst of short steps the recorder rests."""
        rest = self.rest
        rest.awake_calls += 1
        if rest.plan is not None and rest.awake_calls >= rest.plan.measured_calls:
            if self.profiling or self.calibrating or self._calibrate:
                return
            rest.begin()
            self.switch(Activity.REST)

    def stepped_at_rest(self) -> None:
        """An optimizer call has ended that was not measured."""
        self.rest.calls += 1
        if self.rest.plan is None or self.rest.calls >= self.rest.plan.rested_calls:
            self.wake()

    def wake(self) -> None:
        """Measure again, because the rest is over or because something out of the ordinary happens."""
        rest = self.rest
        if rest.on:
            rest.end()
            self.switch(Activity.USER, Rested(rest.calls, rest.batches, rest.samples), Point.STEP)

    def waited_at_rest(self, began_ns: int, ended_ns: int) -> None:
        """Book a long wait for data as it is."""
        self._marks.append((began_ns, Activity.NEXT, None, Point.NONE, None))
        self._marks.append((ended_ns, Activity.REST, None, Point.NONE, None))

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
        self._write(final=True)
        if self._out is not None:
            self._out.close()

    # ------------------------------------------------------------------ on the observer thread

    def _observe(self) -> None:
        next_drain = next_write = time.monotonic() + DRAIN_EVERY_S
        jitter = Random()  # our own: the job's random numbers are the job's
        while True:
            # Never in step with the job: looks at a fixed interval would always meet a 10 ms step at the same place.
            pause_s = LOOK_EVERY_S * (0.5 + jitter.random())
            due_ns = time.perf_counter_ns() + int(pause_s * 1e9)
            time.sleep(pause_s)  # waiting for an Event with a time limit takes the interpreter lock twice as long
            if self._stop.is_set() or os.getpid() != self.pid:
                return
            try:
                self._look(due_ns)
                now = time.monotonic()
                if now >= next_drain:
                    next_drain = now + DRAIN_EVERY_S
                    self._drain()
                    self.notes.poll()
                if now >= next_write:
                    next_write = now + WRITE_EVERY_S
                    self.notes.observer_s = time.thread_time()
                    self._write(final=False)
            except Exception as error:
                self._problem(error)

    def _problem(self, error: Exception) -> None:
        self._problems += 1
        self.notes.remark(f"observer: {type(error).__name__}: {error}")
        if self._problems > 100:
            self._stop.set()

    def _look(self, due_ns: int) -> None:
        """One look at the training thread's stack, due at ``due_ns``, weighted by the time it stands for."""
        now = time.perf_counter_ns()
        since_look, self._last_look_ns = now - self._last_look_ns, now
        activity = self.activity
        slipped = activity is not Activity.USER and self._last_switch_ns > due_ns and self._left is Activity.USER
        if slipped and self.training and not self.notes.evaluating(self.eval_mode):
            self._missed()
        interesting = activity is Activity.USER or self.notes.wants_lines(activity)
        if not interesting or not self.training or self.notes.evaluating(self.eval_mode):
            return
        frame = sys._current_frames().get(self.thread_id or 0)
        if frame is None or activity is not self.activity:
            return
        fetching = TappedIterator.__next__.__code__ if activity is Activity.NEXT else None
        view = look(frame, fetching, self.way_in.spots)
        if view is None:
            return
        # A look that came late (the interpreter lock was held) stands for all of that time, but not for time
        # before the present activity began.
        since_switch = now - self._last_switch_ns
        weight = LOOK_EVERY_S if since_look < 2e9 * LOOK_EVERY_S else min(since_look, since_switch) * NS
        del frame
        view = self.notes.understood(view)
        self.notes.looked(activity, view, weight)
        if activity is Activity.USER:
            self._window[view.kind] = self._window.get(view.kind, 0.0) + weight
            self._window_looks += 1
            if now - due_ns > LATE_NS:
                self._late[view.kind] = self._late.get(view.kind, 0.0) + weight

    def _missed(self) -> None:
        """A look that was due in the user's own code came when that had ended: the interpreter lock was held.

        It stands for such code as other late looks did see.
        """
        total = sum(self._late.values())
        if not total:
            return
        for kind, weight in self._late.items():
            self._window[kind] = self._window.get(kind, 0.0) + LOOK_EVERY_S * weight / total

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
        self._calibrate_at = CALIBRATE_AGAIN * self.notes.steps
        queueing_s = tiles[-1].queueing_ns * NS
        behind_s = gpu.lag_ns * NS
        if behind_s < queueing_s < LONGEST_DELAY_S / LEAD:
            # The driver's queue holds about a thousand kernels: every other time the lead is given for backward alone.
            self._calibrate_from = Point.BATCH if self._calibrate_from is not Point.BATCH else Point.BACKWARD
            self._delay_s = LEAD * queueing_s
            # Each blocking call of a step takes the lead away. Between two of them there is less to queue.
            self._again_delay_s = 2 * LEAD * queueing_s / (1 + self.notes.syncs // self.notes.steps)
            self._calibrate = True

    def _split(self) -> dict[str, float]:
        """How the user's own time divides, by the looks of this window, or of the whole run when they are few."""
        for kind, weight in self._window.items():
            self._overall[kind] = self._overall.get(kind, 0.0) + weight
        split = self._window if self._window_looks >= ENOUGH_LOOKS else self._overall
        return dict(split)

    def _attribute(self) -> None:
        split = self._split()
        tiles = self._builder.closed
        for tile in tiles:
            attributed = attribute(tile, split, self._usual, self.notes.exposed_communication_s())
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
        if tiles:
            tiles.clear()
            self._window.clear()
            self._window_looks = 0

    def _write(self, final: bool) -> None:
        self._attribute()
        if not self.notes.trained(self._builder):
            return
        if final:
            self._ready.extend(self._warm_up.release())
        if self._out is None:
            self.notes.learn_rank()
            self._out = RankFiles.claim(self.folder, self.notes.rank)
        ready, self._ready = self._ready, []
        now_s = (time.perf_counter_ns() - self._t0_ns) * NS
        on_gpu = self.clock is not None
        self._out.write(ready, self.notes.record(self._out.stream, now_s, final, self._builder, on_gpu))
