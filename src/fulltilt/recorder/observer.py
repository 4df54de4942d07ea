"""The observer of one process: a daemon thread that turns the training thread's marks into records.

It samples the training thread's stack 100 times a second (at first 200, later 25), turns marks into spans and writes
the run folder.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import replace
from random import Random
from statistics import median

from fulltilt import cuda_capture
from fulltilt.recorder.attribution import SpanBuilder
from fulltilt.recorder.interpreter_lock import SwitchInterval, wake_on_time
from fulltilt.recorder.marks import Activity, Finished
from fulltilt.recorder.rank_files import RankFiles
from fulltilt.recorder.recorder import Recorder
from fulltilt.recorder.stack_sampler import StackSampler
from fulltilt.recorder.steps import LONG_STEP_FACTOR, LONG_STEP_ON_GPU_NS, plan

# In a pause there are few marks, and reading them takes the interpreter lock from the training thread.
DRAIN_EVERY_S, DRAIN_IN_PAUSE_EVERY_S = 0.2, 1.0
WRITE_EVERY_S = 1.0
# Very many ranks write less often: a network file system has to bear all of them.
RANKS_A_SECOND = 64
# A killed process loses what it has not written: a second, or this share of the run so far if that is less.
LOST_SHARE = 0.1
# The record changes ever more slowly: it is rewritten each time the run has become this much longer.
RECORD_SHARE, RECORD_EVERY_S = 0.05, 10.0
MOST_PROBLEMS = 100
RECENT_INTERVALS = 5
NS = 1e-9


class Observer(threading.Thread):
    """Records one process of a training job into its run folder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(name="fulltilt-observer", daemon=True)
        recorder.observer = self
        self._recorder = recorder
        self._state = recorder.state
        self._sampler = StackSampler(recorder)
        self._spans = SpanBuilder(recorder.t0_ns, recorder.state, self._sampler)
        self._steps_s = deque[float](maxlen=RECENT_INTERVALS)  # of the latest intervals
        self._write_every_s = WRITE_EVERY_S * max(recorder.state.world_size / RANKS_A_SECOND, 1)
        self._out: RankFiles | None = None
        self.switch_interval = SwitchInterval()
        self._stop_asked = threading.Event()

    def start(self) -> None:
        """Begin to observe."""
        self.switch_interval.apply()
        super().start()

    def finish(self) -> None:
        """The job is over: write everything. Safe to call twice, and from an exit handler."""
        recorder = self._recorder
        if not recorder.active or os.getpid() != recorder.pid:
            return
        recorder.resume()
        recorder.switch(Activity.USER, Finished())
        recorder.active = False
        self._stop_asked.set()
        if self.is_alive():
            self.join(timeout=10.0)
        self.switch_interval.restore()
        self._drain(patience_s=5.0)
        self._state.poll()
        self._write_spans(final=True)
        self._write_record(final=True)
        if self._out is not None:
            self._out.close()

    def run(self) -> None:
        """Observe until the job is over."""
        wake_on_time()
        recorder = self._recorder
        began = time.monotonic()
        next_drain = next_write = next_record = began + DRAIN_EVERY_S
        jitter = Random()  # our own: the job's random numbers are the job's
        ruins_nothing, problems = False, 0
        while True:
            # At random intervals: at a fixed one, samples would always see a 10 ms step at the same place.
            every_s = self.switch_interval.every_s(self._sampler.usually_every_s)
            pause_s = every_s * (0.5 + jitter.random())
            self.switch_interval.begin_wait(recorder.cpu_clock)
            due_ns = time.perf_counter_ns() + int(pause_s * 1e9)
            time.sleep(pause_s)  # waiting for an Event with a time limit takes the interpreter lock twice as long
            self.switch_interval.end_wait()
            if self._stop_asked.is_set():
                return
            try:
                ruins_nothing = ruins_nothing or (recorder.clock is not None and cuda_capture.use_thread_local_mode())
                self._sampler.take(due_ns, every_s)
                self._state.threads.sample()
                now = time.monotonic()
                if now >= next_drain:
                    next_drain = now + (DRAIN_IN_PAUSE_EVERY_S if recorder.bursts.paused else DRAIN_EVERY_S)
                    self.switch_interval.apply()
                    self._drain()
                    self._state.poll()
                if now >= next_write:
                    next_write = now + min(max(LOST_SHARE * (now - began), DRAIN_EVERY_S), self._write_every_s)
                    # Before the first stack sample, the user's own time cannot be split.
                    if not self._sampler.none_yet or now - began > WRITE_EVERY_S:
                        self._write_spans()
                if now >= next_record:
                    next_record = now + max(self._write_every_s, min(RECORD_SHARE * (now - began), RECORD_EVERY_S))
                    self._write_record(final=False)
            except Exception as error:
                problems += 1
                self._state.remark(f"observer: {type(error).__name__}: {error}")
                if problems > MOST_PROBLEMS:
                    recorder.active = False  # or unread marks would fill the memory
                    return

    def _drain(self, patience_s: float = 0.0) -> None:
        """Turn the marks whose events have been reached into intervals."""
        deadline = time.monotonic() + patience_s
        recorder, builder = self._recorder, self._recorder.intervals
        marks, clock = recorder.marks, recorder.clock
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
        self._state.steps = builder.steps
        self._plan_calibration()
        if builder.closed:
            interval = builder.closed[-1]
            self._steps_s.append((interval.t1_ns - interval.t0_ns) * NS / max(interval.steps, 1))
            step_s = median(self._steps_s)  # a single long one is not usual
            builder.long_ns = max(LONG_STEP_ON_GPU_NS, LONG_STEP_FACTOR * step_s / NS)
            launch_share = self._spans.usual.launch_share if clock is not None else None
            recorder.bursts.plan = plan(builder.steps, builder.calls, step_s, self._state.scaler, launch_share)

    def _plan_calibration(self) -> None:
        calibration, steps = self._recorder.calibration, self._state.steps
        gpu, intervals = self._recorder.intervals.gpu, self._recorder.intervals.closed
        if gpu is None or not intervals or intervals[-1].times.by_label["paused"] or not calibration.due(steps):
            return
        queueing_s, behind_s = intervals[-1].queueing_ns * NS, gpu.lag_ns * NS
        calibration.ask(steps, queueing_s, behind_s, self._state.syncs, gpu.knows_a_step)

    def _write_spans(self, final: bool = False) -> None:
        intervals = self._recorder.intervals
        self._spans.add(intervals.closed)
        if not self._state.trained(intervals):
            return
        if self._out is None:
            self._state.learn_rank()
            self._out = RankFiles.claim(self._recorder.folder, self._state.rank)
            self._write_record(final=False)  # first: spans without their rank's record cannot be read
        self._out.write(self._spans.take(final))

    def _write_record(self, final: bool) -> None:
        if self._out is None:
            return
        now_ns = time.perf_counter_ns()
        recorder, intervals = self._recorder, self._recorder.intervals
        now_s, on_gpu = (now_ns - recorder.t0_ns) * NS, recorder.clock is not None
        record = self._state.record(self._out.stream, now_s, final, intervals, on_gpu, recorder.bursts.scale)
        record = replace(record, validates_at=recorder.evaluation.where)
        interval = None if final else intervals.under_way(now_ns)
        if interval is not None:
            under_way = self._spans.under_way(interval, intervals.steps)
            record = replace(record, under_way=under_way, at=self._sampler.current_line(now_ns))
        self._out.write_record(record)
