"""The recorder of one process: takes marks on the training thread, makes a run's records of them on another.

The training thread only reads the clock, records an event where there is a GPU, and appends a tuple. A daemon thread,
the observer, samples the training thread's stack 100 times a second (at first 200, later 25), turns marks into spans
and writes the run folder.
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

from fulltilt import cuda_capture
from fulltilt.recorder.attribution import SpanBuilder
from fulltilt.recorder.gpu_clock import Calibration, CudaClock
from fulltilt.recorder.interpreter_lock import LockTurns, cpu_clock, wake_on_time
from fulltilt.recorder.intervals import IntervalBuilder
from fulltilt.recorder.marks import Activity, BookedAtRest, EvalMode, Finished, Point, Rested
from fulltilt.recorder.rank_files import RankFiles
from fulltilt.recorder.rank_state import RankState
from fulltilt.recorder.stacks.frames import LoopFrames
from fulltilt.recorder.stacks.stack_sampler import StackSampler
from fulltilt.recorder.steps import LONG_STEP_FACTOR, LONG_STEP_NS, LONG_STEP_ON_GPU_NS, Rest, plan
from fulltilt.recorder.validation import Evaluation

# At rest there is little to take, and each time takes the interpreter lock from the training thread.
DRAIN_EVERY_S, DRAIN_AT_REST_EVERY_S = 0.2, 0.5
WRITE_EVERY_S = 1.0
# Very many ranks write less often: a network file system has to bear all of them.
RANKS_A_SECOND = 64
# A killed process loses what it has not written: a second, or this part of what was seen where that is less.
LOST_SHARE = 0.1
# Lines, loaders and workers change ever more slowly: they are written at each such part of the job's life, up to these.
RECORD_SHARE, RECORD_EVERY_S = 0.05, 5.0
MOST_PROBLEMS = 100
NS = 1e-9


class Recorder:
    """Records one process of a training job into a run folder."""

    def __init__(self, folder: Path, t0_ns: int, state: RankState) -> None:
        self.folder = folder
        self.state = state
        self.activity = Activity.USER
        self.thread_id = threading.main_thread().ident
        self._cpu_clock = cpu_clock(threading.get_native_id()) if self.thread_id == threading.get_ident() else None
        self.active = True
        self.training = False
        self.eval_mode = False
        self.evaluation = Evaluation()
        self.clock: CudaClock | None = None
        self.calibration = Calibration()
        self.profiling = False
        self.rest = Rest()
        self.usual_step_s = 0.0
        self.loop_frames = LoopFrames()
        self._t0_ns = t0_ns
        self._marks: deque[tuple[Any, ...]] = deque()
        self.intervals = IntervalBuilder(t0_ns, state.world_size)
        self._sampler = StackSampler(self)
        self._spans = SpanBuilder(t0_ns, state, self._sampler)
        self._write_every_s = WRITE_EVERY_S * max(state.world_size / RANKS_A_SECOND, 1)
        self.left = self.left_after = Activity.USER
        self._out: RankFiles | None = None
        self.last_switch_ns = time.perf_counter_ns()
        self._lock_turns = LockTurns()
        self._stop = threading.Event()
        self.pid = os.getpid()
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
        self.active = False  # a forked child (a loader worker) is not the job

    def mine(self) -> bool:
        """Whether the calling thread is the one that trains."""
        return self.active and threading.get_ident() == self.thread_id

    def adopt(self) -> None:
        """The calling thread is the one that trains."""
        self.thread_id, self._cpu_clock = threading.get_ident(), cpu_clock(threading.get_native_id())
        self.state.training_thread = threading.get_native_id()

    def switch(self, activity: Activity, fact: Any = None, point: Point = Point.NONE) -> Activity:
        """From now on the training thread does ``activity``. Returns what it did before."""
        if self.loop_frames.learning and self.training and not self.state.evaluating(self.eval_mode):
            self.loop_frames.see(activity, sys._getframe(1))
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
        rest = self.rest
        rest.measured()
        if rest.plan is not None and rest.awake_calls >= rest.plan.measured_calls:
            if self.profiling or self.calibration.under_way or self.calibration.asked:
                return
            self.switch(Activity.REST)
            rest.begin(self.last_switch_ns)

    def stepped_at_rest(self) -> None:
        """An optimizer call has ended that was not measured."""
        rest = self.rest
        self._passed_at_rest(time.perf_counter_ns())
        rest.calls += 1
        if rest.plan is None or rest.calls >= rest.plan.rested_calls:
            self.wake()

    def wake(self) -> None:
        """Measure again, because the rest is over or because something out of the ordinary happens."""
        rest = self.rest
        if rest.on:
            self._passed_at_rest(time.perf_counter_ns())
            rest.end()
            self.switch(Activity.USER, Rested(rest.calls, rest.drawn), Point.STEP)

    def waited_at_rest(self, began_ns: int, ended_ns: int, turnover: bool = False) -> None:
        """Book a long wait as it is: for data, or for workers to end with their pass."""
        self._passed_at_rest(began_ns)
        self._book_at_rest(Activity.DATA_WAIT, began_ns, ended_ns, turnover)

    def _passed_at_rest(self, now_ns: int) -> None:
        """A step at rest, or its part before a long wait, has passed. A long one is booked by what the samples saw."""
        if now_ns - self.rest.booked_ns > (LONG_STEP_NS if self.clock is None else self.intervals.long_ns):
            self._book_at_rest(Activity.USER, self.rest.booked_ns, now_ns)
        self.rest.booked_ns = now_ns

    def _book_at_rest(self, activity: Activity, began_ns: int, ended_ns: int, turnover: bool = False) -> None:
        self._marks.append((began_ns, activity, None, Point.NONE, None))
        self._marks.append((ended_ns, Activity.REST, BookedAtRest(ended_ns - began_ns, turnover), Point.NONE, None))
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
            self.calibration.under_way = False
        if self.clock is not None and not self.profiling:
            delay_s = self.calibration.begin(point)
            if delay_s is not None:
                self._delay(delay_s)

    def lost_its_lead(self) -> None:
        """A blocking call used up the lead while calibrating: restore it."""
        self._delay(self.calibration.again_delay_s)

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
        self.state.poll()
        self._write_spans(final=True)
        self._write_record(final=True)
        if self._out is not None:
            self._out.close()

    # ------------------------------------------------------------------ on the observer thread

    def evaluates(self, on: bool) -> None:
        """A sample has shown whether the training thread evaluates, whatever mode the model is in."""
        self.eval_mode = on
        self.state.taps.was_evaluating = on
        self.note(EvalMode(on))

    def _observe(self) -> None:
        wake_on_time()
        began = time.monotonic()
        next_drain = next_write = next_record = began + DRAIN_EVERY_S
        jitter = Random()  # our own: the job's random numbers are the job's
        ruins_nothing, problems = False, 0
        while True:
            # Never in step with the job: samples at a fixed interval would always meet a 10 ms step at the same place.
            every_s = self._lock_turns.every_s(self._sampler.usually_every_s)
            pause_s = every_s * (0.5 + jitter.random())
            self._lock_turns.begin_wait(self._cpu_clock)
            due_ns = time.perf_counter_ns() + int(pause_s * 1e9)
            time.sleep(pause_s)  # waiting for an Event with a time limit takes the interpreter lock twice as long
            self._lock_turns.end_wait()
            if self._stop.is_set() or os.getpid() != self.pid:
                return
            try:
                ruins_nothing = ruins_nothing or (self.clock is not None and cuda_capture.use_thread_local_mode())
                self._sampler.take(due_ns, every_s)
                self.state.threads.sample()
                now = time.monotonic()
                if now >= next_drain:
                    next_drain = now + (DRAIN_AT_REST_EVERY_S if self.rest.on else DRAIN_EVERY_S)
                    self._lock_turns.share()
                    self._drain()
                    self.state.poll()
                if now >= next_write:
                    next_write = now + min(max(LOST_SHARE * (now - began), DRAIN_EVERY_S), self._write_every_s)
                    # Before the first sample of the user's own time nobody could say what that went into.
                    if not self._sampler.none_yet or now - began > WRITE_EVERY_S:
                        self._write_spans()
                if now >= next_record:
                    next_record = now + max(self._write_every_s, min(RECORD_SHARE * (now - began), RECORD_EVERY_S))
                    self._write_record(final=False)
            except Exception as error:
                problems += 1
                self.state.remark(f"observer: {type(error).__name__}: {error}")
                if problems > MOST_PROBLEMS:
                    self.active = False  # or marks that nobody reads would fill the memory
                    return

    def _drain(self, patience_s: float = 0.0) -> None:
        """Turn the marks whose events have been reached into intervals."""
        deadline = time.monotonic() + patience_s
        marks, clock, builder = self._marks, self.clock, self.intervals
        while marks:
            raw = marks[0]
            reached = None
            if raw[4] is not None and clock is not None:
                reached = clock.resolve(raw[4])
                if reached is None:
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(0.001)
                    continue
            marks.popleft()
            builder.feed(raw, reached)
        self.state.steps = builder.steps
        self._plan_calibration()
        if builder.closed:
            interval = builder.closed[-1]
            step_s = (interval.t1_ns - interval.t0_ns) * NS / max(interval.steps, 1)
            self.usual_step_s = min(step_s, 2 * (self.usual_step_s or step_s))  # a single long one is not usual
            builder.long_ns = max(LONG_STEP_ON_GPU_NS, LONG_STEP_FACTOR * self.usual_step_s / NS)
            launch_share = self._spans.usual.launch_share if clock is not None else None
            self.rest.plan = plan(builder.steps, builder.calls, step_s, self.state.scaler, launch_share)

    def _plan_calibration(self) -> None:
        gpu, intervals, steps = self.intervals.gpu, self.intervals.closed, self.state.steps
        if gpu is None or not intervals or intervals[-1].times.by_label["rest"] or not self.calibration.due(steps):
            return
        queueing_s, behind_s = intervals[-1].queueing_ns * NS, gpu.lag_ns * NS
        self.calibration.ask(steps, queueing_s, behind_s, self.state.syncs, gpu.knows_a_step)

    def _write_spans(self, final: bool = False) -> None:
        self._spans.add(self.intervals.closed)
        if not self.state.trained(self.intervals):
            return
        if self._out is None:
            self.state.learn_rank()
            self._out = RankFiles.claim(self.folder, self.state.rank)
            self._write_record(final=False)  # first: spans without their rank's record cannot be read
        self._out.write(self._spans.take(final))

    def _write_record(self, final: bool) -> None:
        if self._out is None:
            return
        now_ns = time.perf_counter_ns()
        now_s, on_gpu = (now_ns - self._t0_ns) * NS, self.clock is not None
        record = self.state.record(self._out.stream, now_s, final, self.intervals, on_gpu, self.rest.not_stood_for)
        record = replace(record, validates_at=self.evaluation.where)
        interval = None if final else self.intervals.under_way(now_ns)
        if interval is not None:
            under_way = self._spans.under_way(interval, self.intervals.steps)
            record = replace(record, under_way=under_way, at=self._sampler.stands_at(now_ns))
        self._out.write_record(record)
