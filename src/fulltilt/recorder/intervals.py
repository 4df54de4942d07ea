"""From marks to intervals, in which every nanosecond of the training thread is booked once. Pure, no torch.

Without a GPU an interval is host time: each stretch between two marks is booked as its activity. On a GPU it is GPU
time, cut at the events (see gpu_clock). It ends with a step: the first hundred hold one step each, later ones as many
as pass in a twentieth of a second or in 1/2000 of the run, so that their number grows with the run's logarithm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fulltilt.recorder import marks
from fulltilt.recorder.gpu_clock import GpuTime
from fulltilt.recorder.marks import LABEL, PHASE, Activity, ActivityTimes, Mark, Totals
from fulltilt.recorder.steps import LONG_STEP_ON_GPU_NS, LONG_WAIT_NS, StepCounter

ONE_BY_ONE = 100
MOST_STRETCHES = 8192  # more than pass while stack samples wait to be sorted
SHORTEST_NS = 50e6
RESOLUTION = 2000
# The more ranks, the coarser the intervals of each: the files of all of them are read together.
RANKS_IN_FULL, LEAST_RESOLUTION = 8, 100

DATA_WAIT, OPTIMIZER, CHECKPOINT, SYNC = Activity.DATA_WAIT, Activity.OPTIMIZER, Activity.CHECKPOINT, Activity.SYNC
USER = Activity.USER


@dataclass(slots=True)
class Interval:
    """A stretch of the job's time with ``steps`` steps in it. ``times`` add up to ``t1_ns - t0_ns``."""

    t0_ns: float
    t1_ns: float = 0.0
    steps: int = 0
    skipped: int = 0
    batches: int = 0
    samples: int | None = None
    epoch: int = 0
    times: ActivityTimes = field(default_factory=ActivityTimes)
    step_max_ns: float = 0.0
    sync_blocked_ns: float = 0.0
    gpu: bool = False
    # Measured waits for data so long that a pause would book them, too; and what pauses did book, by label.
    long_waits_ns: float = 0.0
    in_pause_ns: Totals[str] = field(default_factory=Totals)
    counted_steps: int = 0  # of its steps, those that were only counted

    def count(self, batches: int, samples: int | None) -> None:
        """Add batches and samples of its steps; None where the samples could not be counted."""
        self.batches += batches
        if samples is not None:
            self.samples = (self.samples or 0) + samples

    @property
    def queueing_ns(self) -> float:
        """Host time of a step in which it may queue work for a GPU."""
        busy = sum(self.times.phases[phase] for phase in ("user", "backward", "optimizer"))
        return busy / max(self.steps, 1)


class Stretch(NamedTuple):
    """A stretch of the user's own time after an optimizer's step, or one too long for launching; what came next."""

    began_ns: float
    ended_ns: float
    long: bool
    next: Activity


class IntervalBuilder:
    """Takes marks in order, with the GPU's time of each event; finished intervals are in ``closed``."""

    def __init__(self, t0_ns: int, ranks: int = 1) -> None:
        self._resolution = min(RESOLUTION, max(RESOLUTION * RANKS_IN_FULL // max(ranks, 1), LEAST_RESOLUTION))
        self.counter = StepCounter()
        self.closed: list[Interval] = []
        self.epoch = 0
        self.validating = False
        self.gpu: GpuTime | None = None
        # On a GPU, a stretch of the user's own time that is longer than this is not launching.
        self.long_ns: float = LONG_STEP_ON_GPU_NS
        self._stretches: deque[Stretch] = deque(maxlen=MOST_STRETCHES)
        self._t0_ns = t0_ns
        self.now_ns: float = t0_ns  # of the last mark
        self._activity = self._after = Activity.USER
        self.since_ns: float = t0_ns  # when what is under way began
        self._started = False
        self._preparing = True
        self._eval_mode = False
        self._in_backward = False
        self._data_wait_ns = 0.0  # the wait under way, or just ended
        self._hand_steps = 0
        self._before_pass: dict[int, Totals[str]] = {}
        self._undeclared: Totals[str] = Totals()
        self.steps = 0
        self.calls = 0
        self._intervals = 0
        self._step_end: float = t0_ns
        self._interval = Interval(t0_ns)
        self._at_step_end = ActivityTimes()  # what the interval's times held when its last step ended
        self._meaning: dict[type, Callable[[Any], None]] = {
            marks.BatchArrived: self._batch,
            marks.BackwardBegan: self._backward_began,
            marks.BackwardEnded: self._backward_ended,
            marks.OptimizerStepped: self._stepped,
            marks.PassBegan: self._pass_began,
            marks.PassEnded: self._pass_ended,
            marks.WaitBegan: lambda fact: self._evaluate(fact.evaluating),
            marks.EpochBegan: self._epoch_began,
            marks.EvalMode: self._eval_mode_set,
            marks.StepsCounted: self._steps_counted,
            marks.BookedInPause: self._booked_in_pause,
            marks.Finished: self._finish,
        }

    # ------------------------------------------------------------------ marks in

    def feed(self, mark: Mark | tuple[Any, ...], gpu_ns: float | None = None) -> None:
        """Take one mark. ``gpu_ns`` is when the GPU reached its event, on the host's clock."""
        t_ns, activity, fact, point, _ = mark
        if t_ns > self.now_ns:
            self._spend(t_ns)
        if gpu_ns is not None:
            if self.gpu is None:
                # The queue was drained for the first event, so that host and GPU are at the same point in time.
                self.gpu = GpuTime(self.now_ns, point)
            else:
                self.gpu.advance(float(t_ns), gpu_ns, point, self._interval.times)
        if fact is not None:
            self._meaning[type(fact)](fact)
        if activity is not None and activity is not self._activity:
            if self._activity is USER:
                long = self._is_long(self.now_ns)
                if long or (self._after is OPTIMIZER and not self.validating):
                    self._stretches.append(Stretch(self.since_ns, self.now_ns, long, activity))
            self._after, self._activity, self.since_ns = self._activity, activity, self.now_ns

    def _spend(self, t_ns: int) -> None:
        """Book the host time since the last mark."""
        began, self.now_ns = self.now_ns, float(t_ns)
        spent, activity = self.now_ns - began, self._activity
        if self._is_long(self.now_ns):
            activity = Activity.LONG_USER
            self._was_long()
        if not self._preparing and not self.validating:
            if activity is DATA_WAIT:
                self._data_wait_ns += spent
            elif activity is SYNC:
                self._interval.sync_blocked_ns += spent
            elif activity is USER:
                self._interval.times.user_after[self._after] += spent
            exchanges = self._in_backward and activity is Activity.COMMUNICATION
            self._interval.times.phases["backward" if exchanges else PHASE[activity]] += spent
        if self.gpu is None:
            self._interval.times.by_label[self._label(activity)] += spent
        else:
            self.gpu.held.append((began, self.now_ns, self._label(activity)))

    def _was_long(self) -> None:
        """Relabel what is held of the user's own time under way: it has become too long for launching."""
        assert self.gpu is not None
        held = self.gpu.held
        for place, (began, ended, label) in enumerate(held):
            if label == LABEL[USER] and began >= self.since_ns:
                held[place] = (began, ended, LABEL[Activity.LONG_USER])

    def _is_long(self, now_ns: float) -> bool:
        """Whether the thread is in the user's own time, for too long to be launching kernels."""
        on_gpu = self.gpu is not None and not self._preparing
        return on_gpu and self._activity is USER and now_ns - self.since_ns > self.long_ns

    def stretch_at(self, t_ns: float, now_ns: float) -> tuple[bool, Activity | None]:
        """Whether the user's own time at ``t_ns``, in order, is too long for launching; and what came after it."""
        if t_ns >= self.since_ns:
            return self._is_long(now_ns), None
        stretches = self._stretches
        while stretches and stretches[0].ended_ns < t_ns:
            stretches.popleft()
        if not stretches or stretches[0].began_ns > t_ns:
            return False, None
        return stretches[0].long, stretches[0].next

    def _label(self, activity: Activity) -> str:
        if self._preparing:
            return "startup"
        return "validation" if self.validating and activity is not CHECKPOINT else LABEL[activity]

    # ------------------------------------------------------------------ what facts mean

    def _batch(self, fact: marks.BatchArrived) -> None:
        if self._undeclared:
            self._settle_undeclared()
        self._evaluate(fact.evaluating)
        self.counter.batch(fact.loader_id, fact.samples, fact.evaluating, fact.doubtful)
        if not self._started:
            # Whatever came before the batch of the first backward was preparation.
            self._interval.times = ActivityTimes(Totals(startup=sum(self._interval.times.by_label.values())))
            self._preparing = False
        elif fact.evaluating:
            self._relabel_wait("validation")
        elif fact.first and fact.workers:
            self._relabel_wait("epoch_turnover")
        elif self._data_wait_ns > LONG_WAIT_NS:
            self._interval.long_waits_ns += self._data_wait_ns
        self._data_wait_ns = 0.0

    def _relabel_wait(self, label: str) -> None:
        """Book the wait that just ended as ``label``."""
        if self.gpu is None:
            self._interval.times.move("data_wait", label, self._data_wait_ns)
        elif self.gpu.held and self.gpu.held[-1][2] == "data_wait":
            began, ended, _ = self.gpu.held[-1]
            self.gpu.held[-1] = (began, ended, label)

    def _pass_began(self, fact: marks.PassBegan) -> None:
        self._before_pass[fact.loader_id] = Totals(self._interval.times.by_label)
        if not fact.evaluating:
            self.counter.pass_began(fact.loader_id)
        self._evaluate(fact.evaluating)

    def _pass_ended(self, fact: marks.PassEnded) -> None:
        before = self._before_pass.pop(fact.loader_id, Totals[str]())
        trained = self.counter.pass_ended(fact.loader_id, fact.evaluating)
        if fact.evaluating:
            self._relabel_wait("validation")
            self._evaluate(self._eval_mode)
        elif trained:
            self.epoch += 1
            if fact.workers:
                self._relabel_wait("epoch_turnover")
        elif self.gpu is None and self._started:
            # A whole pass with gradients on and no backward: an undeclared evaluation, unless backward comes next
            # (then the batches were drawn ahead, to be accumulated).
            self._undeclared = self._interval.times.by_label.beyond(before)
        self._data_wait_ns = 0.0

    def _settle_undeclared(self) -> None:
        for label, ns in self._undeclared.items():
            if label != "checkpoint":
                self._interval.times.move(label, "validation", ns)
        self._undeclared = Totals()

    def _evaluate(self, on: bool) -> None:
        self.validating = on and self._started

    def _eval_mode_set(self, fact: marks.EvalMode) -> None:
        self._eval_mode = fact.on
        self._evaluate(fact.on)

    def _epoch_began(self, fact: marks.EpochBegan) -> None:
        self.epoch = fact.number

    def _backward_began(self, _: marks.BackwardBegan) -> None:
        self._started = True
        self._preparing = self.validating = self._eval_mode = False
        self._in_backward = True
        if self._undeclared:
            self._undeclared = Totals()
            self.epoch += 1

    def _backward_ended(self, _: marks.BackwardEnded) -> None:
        if self._in_backward:
            self._in_backward = False
            self.counter.backward()
        if not self.counter.optimizer_seen:
            self._hand_steps += 1
            if self.counter.updates_by_hand():
                steps, self._hand_steps = self._hand_steps, 0
                self._end_step(steps)

    def _stepped(self, fact: marks.OptimizerStepped) -> None:
        self._hand_steps = 0
        self.calls += 1
        if self._in_backward:  # a hook steps as soon as its parameter's gradient is there
            self._in_backward = False
            self.counter.backward()
        if self.counter.optimizer_stepped(fact.optimizer_id):
            self._interval.skipped += fact.skipped
            self._end_step(1)

    def _booked_in_pause(self, fact: marks.BookedInPause) -> None:
        label = LABEL[self._activity]
        if fact.turnover:
            label = "epoch_turnover"
            self._relabel_wait(label)
        self._interval.in_pause_ns[label] += fact.ns
        self._data_wait_ns = 0.0

    def _steps_counted(self, fact: marks.StepsCounted) -> None:
        steps = fact.calls * self.steps // self.calls if self.calls else 0
        batches, samples = self.counter.drawn_in_pause(fact.drawn)
        self._interval.count(batches, samples or None)
        self.calls += fact.calls
        self._interval.counted_steps += steps
        if steps:
            self._end_step(steps)

    # ------------------------------------------------------------------ intervals out

    def _position(self) -> float:
        """The present end of the job's time: the GPU's, once there is one."""
        return self.now_ns if self.gpu is None else self.gpu.position_ns

    def _end_step(self, steps: int) -> None:
        position, interval = self._position(), self._interval
        interval.steps += steps
        self.steps += steps
        interval.step_max_ns = max(interval.step_max_ns, (position - self._step_end) / steps)
        self._step_end = position
        interval.count(*self.counter.take_counts())
        long_enough = max(SHORTEST_NS, (position - self._t0_ns) / self._resolution)
        if self._intervals < ONE_BY_ONE or position - interval.t0_ns >= long_enough:
            self._close(position)
        self._at_step_end = self._interval.times.copy()

    def _close(self, position: float) -> None:
        closed, self._interval = self._interval, Interval(position)
        closed.t1_ns, closed.epoch, closed.gpu = position, self.epoch, self.gpu is not None
        self.closed.append(closed)
        self._intervals += 1
        self._at_step_end = ActivityTimes()

    def under_way(self, now_ns: float) -> Interval | None:
        """What has passed since the last step, in case the job is killed before the next.

        None before the first step, and in a pause, where what is waited for is not known.
        """
        if not self.steps or self._activity is Activity.PAUSED or now_ns <= self._step_end:
            return None
        times = self._interval.times.beyond(self._at_step_end)
        for began, ended, label in self.gpu.held if self.gpu is not None else ():
            times.by_label[label] += ended - began
        label = self._label(Activity.LONG_USER if self._is_long(now_ns) else self._activity)
        times.by_label[label] += now_ns - self.now_ns
        if label == LABEL[USER]:
            times.user_after[self._after] += now_ns - self.now_ns
        return Interval(self._step_end, now_ns, epoch=self.epoch, times=times, gpu=self.gpu is not None)

    def _finish(self, _: marks.Finished) -> None:
        self.counter.settle()
        self._settle_undeclared()
        if self._hand_steps:
            self._end_step(self._hand_steps)
        if self.gpu is not None:
            self.gpu.drain(self.now_ns, self._interval.times)
        if self._interval.steps and self._position() > self._step_end:
            # The time after the last step is not training: it gets an interval of its own.
            later = self._interval.times.beyond(self._at_step_end)
            self._interval.times = self._at_step_end
            self._close(self._step_end)
            self._interval.times = later
        if self._position() > self._interval.t0_ns or self._interval.steps:
            self._close(self._position())
