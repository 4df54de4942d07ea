"""The recorder of one process, on the training thread: it appends marks, which the observer turns into records.

All it does there is read the clock, record an event where there is a GPU, and append a tuple.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from fulltilt.recorder.gpu_clock import Calibration, CudaClock
from fulltilt.recorder.interpreter_lock import cpu_clock
from fulltilt.recorder.intervals import IntervalBuilder
from fulltilt.recorder.marks import Activity, BookedInPause, EvalMode, Point, StepsCounted
from fulltilt.recorder.rank_state import RankState
from fulltilt.recorder.stacks.frames import LoopFrames
from fulltilt.recorder.steps import LONG_STEP_NS, Bursts
from fulltilt.recorder.validation import Evaluation, GradientsOff


class Recorder:
    """What the hooks note of one process of a training job."""

    observer: threading.Thread

    def __init__(self, folder: Path, t0_ns: int, state: RankState) -> None:
        self.folder = folder
        self.t0_ns = t0_ns
        self.state = state
        self.activity = Activity.USER
        self.previous = self.before_previous = Activity.USER
        self.thread_id = threading.main_thread().ident
        self.cpu_clock = cpu_clock(threading.get_native_id()) if self.thread_id == threading.get_ident() else None
        self.pid = os.getpid()
        self.active = True
        self.training = False
        self.eval_mode = False
        self.evaluation = Evaluation()
        self.gradients_off = GradientsOff(self)
        self.clock: CudaClock | None = None
        self.calibration = Calibration()
        self.profiling = False
        self.bursts = Bursts()
        self.loop_frames = LoopFrames()
        self.marks: deque[tuple[Any, ...]] = deque()
        self.intervals = IntervalBuilder(t0_ns, state.world_size)
        self.last_switch_ns = time.perf_counter_ns()

    # ------------------------------------------------------------------ on the training thread

    def ensure_started(self) -> None:
        """Begin to observe. Processes that never train are never observed."""
        if self.active and self.observer.ident is None:
            os.register_at_fork(after_in_child=self._disown)
            self.observer.start()

    def _disown(self) -> None:
        self.active = False  # a forked child (a loader worker) is not the job

    def on_training_thread(self) -> bool:
        """Whether the calling thread is the one that trains."""
        return self.active and threading.get_ident() == self.thread_id

    def use_this_thread(self) -> None:
        """The calling thread is the one that trains."""
        self.thread_id, self.cpu_clock = threading.get_ident(), cpu_clock(threading.get_native_id())
        self.state.training_thread = threading.get_native_id()

    def switch(self, activity: Activity, fact: Any = None, point: Point = Point.NONE) -> Activity:
        """From now on the training thread does ``activity``. Returns what it did before."""
        if self.loop_frames.learning and self.training and not self.state.evaluating(self.eval_mode):
            self.loop_frames.see(activity, sys._getframe(1))
        event = self.clock.record() if point and self.clock is not None else None
        now = time.perf_counter_ns()
        self.marks.append((now, activity, fact, point, event))
        self.last_switch_ns = now
        before = self.activity
        if before is not activity:
            self.before_previous, self.previous = self.previous, before
            self.activity = activity
        return before

    def stepped(self) -> None:
        """An optimizer call has ended. After a burst of short steps the recorder pauses."""
        bursts = self.bursts
        bursts.measured()
        if bursts.plan is not None and bursts.measured_calls >= bursts.plan.measured_calls:
            if self.profiling or self.calibration.under_way or self.calibration.asked:
                return
            self.switch(Activity.PAUSED)
            bursts.pause(self.last_switch_ns)

    def counted_step(self) -> None:
        """An optimizer call has ended that was not measured."""
        bursts = self.bursts
        self._passed_in_pause(time.perf_counter_ns())
        bursts.counted_calls += 1
        if bursts.plan is None or bursts.counted_calls >= bursts.plan.counted_calls:
            self.resume()

    def resume(self) -> None:
        """Measure again: enough steps were only counted, or something out of the ordinary happens."""
        bursts = self.bursts
        if bursts.paused:
            self._passed_in_pause(time.perf_counter_ns())
            bursts.resume()
            self.switch(Activity.USER, StepsCounted(bursts.counted_calls, bursts.drawn), Point.STEP)

    def waited_in_pause(self, began_ns: int, ended_ns: int, turnover: bool = False) -> None:
        """Book a long wait as it is: for data, or for workers to end with their pass."""
        self._passed_in_pause(began_ns)
        self._book_in_pause(Activity.DATA_WAIT, began_ns, ended_ns, turnover)

    def _passed_in_pause(self, now_ns: int) -> None:
        """A step, or its part before a long wait, has passed in a pause; a long one is booked by what samples saw."""
        if now_ns - self.bursts.booked_ns > (LONG_STEP_NS if self.clock is None else self.intervals.long_ns):
            self._book_in_pause(Activity.USER, self.bursts.booked_ns, now_ns)
        self.bursts.booked_ns = now_ns

    def _book_in_pause(self, activity: Activity, began_ns: int, ended_ns: int, turnover: bool = False) -> None:
        self.marks.append((began_ns, activity, None, Point.NONE, None))
        self.marks.append((ended_ns, Activity.PAUSED, BookedInPause(ended_ns - began_ns, turnover), Point.NONE, None))
        self.bursts.booked_ns = ended_ns

    def note(self, fact: Any) -> None:
        """Note a fact from any thread, without a change of activity."""
        self.marks.append((time.perf_counter_ns(), None, fact, Point.NONE, None))

    def trains_on_gpu(self, torch: Any, index: int) -> None:
        """Start the GPU's clock, between two steps, once an optimizer has CUDA parameters, on the GPU ``index``."""
        if self.clock is None:
            self.clock, self.state.gpu = CudaClock(torch), index

    def calibrate_if_asked(self, point: Point) -> None:
        """Give the host a lead at this point of a step if the observer has asked for it."""
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

    # ------------------------------------------------------------------ on the observer's thread

    def evaluates(self, on: bool) -> None:
        """A stack sample has shown whether the training thread evaluates, in whatever mode the model is."""
        self.eval_mode = on
        self.state.loaders.was_evaluating = on
        self.note(EvalMode(on))
