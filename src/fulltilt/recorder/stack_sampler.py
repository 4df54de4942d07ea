"""The observer's samples of the training thread's stack: which lines cost time, and how the user's own time divides."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import CodeType
from typing import Any, NamedTuple

from fulltilt.recorder.loaders import BatchTimer
from fulltilt.recorder.marks import Activity, Totals
from fulltilt.recorder.recorder import Recorder
from fulltilt.recorder.stacks.frames import Stack, StackView, stack_of, user_code_in_backward, view_of
from fulltilt.recorder.steps import LONG_STEP_NS
from fulltilt.records import HotLine

SAMPLE_EVERY_S = 0.01
# A short run has few samples: at first they are taken twice as often.
EARLY_SAMPLES, EARLY_SAMPLE_EVERY_S = 400, 0.005
# Each takes the interpreter lock from the training thread, and 0.1 ms of its time where no CPU is free. Fewer suffice
# after some twenty seconds, when the usual is known and only what lasts still matters, and in pauses.
MANY_SAMPLES, LATER_SAMPLE_EVERY_S = 2400, 0.04
MANY_SAMPLES_IN_PAUSE, LATER_IN_PAUSE_EVERY_S = 800, 0.1
# A sample is late when it had to wait for the interpreter lock.
LATE_NS = 300_000
# All samples before the present window weigh as much as this many seconds of new ones.
WEIGHT_OF_EARLIER_S = 4 * SAMPLE_EVERY_S
NS = 1e-9


class KindWeights(Totals[str]):
    """Seconds of stack samples by kind: those of the present window, and a little of what was before."""

    def begin_window(self) -> None:
        """The samples of the window have been used: scale them down."""
        scale = min(1.0, WEIGHT_OF_EARLIER_S / (sum(self.values()) or 1.0))
        self.update({kind: scale * weight_s for kind, weight_s in self.items()})


class PendingSample(NamedTuple):
    """A stack sample of the user's own time that only later marks can classify."""

    t_ns: int
    after: Activity
    view: StackView
    weight_s: float
    began_ns: int = 0  # the mark before it


class CallOrder:
    """Learns on CPUs which functions of the training loop are called between the optimizer and the model.

    What torch computes there is no part of the forward pass: averaged weights, norms of gradients, the next batch.
    """

    ENOUGH = 3

    def __init__(self) -> None:
        self._before_model: Counter[Any] = Counter()
        self._of_model: set[Any] = set()  # called after the model, or calling it
        self._model_since_ns = 0  # the mark before the forward pass that was seen last

    def see(self, view: StackView, began_ns: int, pending: list[PendingSample]) -> None:
        """A sample between the optimizer and backward, and those before it."""
        if view.in_model and self._model_since_ns != began_ns:
            self._model_since_ns = began_ns
            earlier = (one.view for one in pending if one.began_ns == began_ns)
            self._before_model.update({view.called_at for view in earlier if view.kind == "torch"})
        if self._model_since_ns == began_ns:
            self._of_model.add(view.called_at)

    def precedes_model(self, view: StackView) -> bool:
        """Whether the loop calls this function before the model, and the function does not call the model."""
        call = view.called_at
        return call is not None and call not in self._of_model and self._before_model[call] >= self.ENOUGH


class StackSampler:
    """Takes stack samples, each weighted by its time, and sorts them by the activity that came before."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last_ns = time.perf_counter_ns()
        self._every_s = EARLY_SAMPLE_EVERY_S
        self._after: dict[Activity, KindWeights] = {}
        self._backward = KindWeights()
        self._late: Totals[str] = Totals()
        self._long_step_ns = 0  # when the long step began that the last sample in a pause saw
        self._taken = 0
        self._pending: list[PendingSample] = []
        self._calls = CallOrder()

    @property
    def usually_every_s(self) -> float:
        """The interval between samples where sampling costs little."""
        if self._taken < EARLY_SAMPLES:
            return EARLY_SAMPLE_EVERY_S
        if self._recorder.bursts.paused:
            return LATER_IN_PAUSE_EVERY_S if self._taken > MANY_SAMPLES_IN_PAUSE else LATER_SAMPLE_EVERY_S
        return LATER_SAMPLE_EVERY_S if self._taken > MANY_SAMPLES else SAMPLE_EVERY_S

    def take(self, due_ns: int, every_s: float) -> None:
        """Take one sample of the training thread's stack, due at ``due_ns``, with a weight of ``every_s``."""
        recorder = self._recorder
        self._every_s = every_s
        self._taken += recorder.training
        now_ns = time.perf_counter_ns()
        since_sample_ns, self._last_ns = now_ns - self._last_ns, now_ns
        activity = recorder.activity
        if activity is Activity.PAUSED:
            self._take_in_pause(now_ns, since_sample_ns)
            return
        if recorder.evaluation.in_sight and activity is Activity.USER:
            self._check_end_of_evaluation()
        evaluating = recorder.training and recorder.state.evaluating(recorder.eval_mode)
        training = recorder.training and not evaluating
        if activity is Activity.BACKWARD and training and recorder.clock is None:
            self._take_in_backward()
            return
        slipped = activity is not Activity.USER and recorder.previous is Activity.USER
        if training and slipped and recorder.last_switch_ns > due_ns:
            self._missed()
        # In next() the thread fetches, or runs the sampler; within other activities no line is of use.
        if activity is not Activity.USER and (activity is not Activity.DATA_WAIT or evaluating):
            return
        if not recorder.training:
            return
        after = recorder.previous
        stack = self._stack_in(activity)
        if stack is None:
            return
        view = self._view(stack, BatchTimer.draw.__code__ if activity is Activity.DATA_WAIT else None)
        if view is None:
            return
        # A sample that came late (the interpreter lock was held) has the weight of all that time since the present
        # activity began.
        on_time = since_sample_ns < 2e9 * every_s
        weight_s = every_s if on_time else max(min(since_sample_ns, now_ns - recorder.last_switch_ns), 0) * NS
        if evaluating:
            recorder.state.sampled_in_validation(view, weight_s)
            return
        if activity is not Activity.USER:
            recorder.state.sampled(activity, view, weight_s)
            return
        if now_ns - due_ns > LATE_NS:
            self._late[view.kind] += weight_s
        began_ns = recorder.last_switch_ns
        if after is Activity.OPTIMIZER and recorder.clock is None:
            self._calls.see(view, began_ns, self._pending)
        if recorder.clock is not None or (after is Activity.OPTIMIZER and self._is_undecided(view)):
            self._pending.append(PendingSample(now_ns, after, view, weight_s, began_ns))
            return
        recorder.state.sampled(activity, view, weight_s)
        self._add(after, view.kind, weight_s)

    def _stack_in(self, activity: Activity) -> Stack | None:
        """The training thread's stack; None when it is no longer at this activity."""
        stack = stack_of(self._recorder.thread_id or 0)
        return stack if self._recorder.activity is activity else None

    def _view(self, stack: Stack, inside: CodeType | None = None) -> StackView | None:
        view = view_of(stack, inside, self._recorder.loop_frames.known)
        if view is None:
            return None
        # On a GPU, what a generator has torch do is the GPU's time.
        if view.kind == "torch" and view.drawn_from is not None and self._recorder.clock is None:
            return replace(view, kind="data_wait")
        return self._recorder.state.resolve_waiting(view)

    def _settle(self) -> None:
        """Sort the pending samples whose time a mark has ended; the others stay."""
        since_ns, pending = self._recorder.intervals.since_ns, self._pending
        self._pending = [sample for sample in pending if sample.t_ns >= since_ns]
        for sample in pending:
            if sample.t_ns < since_ns:
                after, view = self._judged(sample)
                self._recorder.state.sampled(Activity.USER, view, sample.weight_s)
                self._add(after, view.kind, sample.weight_s)

    def _judged(self, sample: PendingSample) -> tuple[Activity, StackView]:
        """What the marks show of a sample: the activity before it, and whose work it saw."""
        view = sample.view
        long, following = self._recorder.intervals.stretch_at(sample.t_ns, time.perf_counter_ns())
        # Where a batch is drawn next, there is no forward pass in between.
        own = following in (Activity.DATA_WAIT, Activity.EPOCH_TURNOVER) or self._calls.precedes_model(view)
        undecided = sample.after is Activity.OPTIMIZER and self._is_undecided(view)
        # What takes torch long is work on the CPU, such as making the next batches, and no launching.
        if (undecided and own) or (long and view.kind == "torch"):
            view = replace(view, kind="host")
        return Activity.LONG_USER if long else sample.after, view

    def current_line(self, now_ns: int) -> HotLine | None:
        """The line the training thread is at, and the seconds of its present activity."""
        recorder = self._recorder
        stack = stack_of(recorder.thread_id or 0)
        view = None if stack is None else self._view(stack)
        if view is None:
            return None
        return HotLine(view.where, view.function, (now_ns - recorder.last_switch_ns) * NS, view.call)

    def _check_end_of_evaluation(self) -> None:
        recorder = self._recorder
        stack = self._stack_in(Activity.USER)
        if stack is None or not recorder.evaluation.in_sight:
            return
        on = recorder.evaluation.goes_on(stack)
        if on != recorder.state.evaluating(recorder.eval_mode):
            recorder.evaluates(on)

    def _is_undecided(self, view: StackView) -> bool:
        """Whether only later marks show if this work, torch's on a CPU or a generator's, made a batch."""
        return not view.of_training and (
            view.kind == "data_wait" or (view.kind == "torch" and self._recorder.clock is None)
        )

    def _take_in_backward(self) -> None:
        """Most of backward is torch's, but hooks and backward functions of the user's may hold it up.

        On a GPU it runs on another thread, and the GPU's work hides what the host does there.
        """
        recorder, stack = self._recorder, self._stack_in(Activity.BACKWARD)
        if stack is None:
            return
        view = view_of(stack, None, recorder.loop_frames.known) if user_code_in_backward(stack) else None
        if view is not None and (view := recorder.state.resolve_waiting(view)).kind == "host":
            recorder.state.sampled(Activity.USER, view, self._every_s)
            self._backward["host"] += self._every_s
        else:
            self._backward["torch"] += self._every_s

    def _take_in_pause(self, now_ns: int, since_sample_ns: int) -> None:
        """In a pause samples only name lines, and those of a long step also divide its time."""
        recorder = self._recorder
        began_ns = recorder.bursts.booked_ns
        on_gpu = recorder.clock is not None
        takes_long = now_ns - began_ns > (recorder.intervals.long_ns if on_gpu else LONG_STEP_NS)
        stack = self._stack_in(Activity.PAUSED)
        if stack is None:
            return
        weight_s = self._every_s
        view = view_of(stack, BatchTimer.draw.__code__)
        if view is not None:
            recorder.state.sampled(Activity.DATA_WAIT, view, weight_s)
            return
        view = self._view(stack)
        if view is None:
            return
        if takes_long:
            # The first sample of a long step has the weight of all of it so far.
            weight_s = (since_sample_ns if began_ns == self._long_step_ns else now_ns - began_ns) * NS
            self._long_step_ns = began_ns
            if on_gpu and view.kind == "torch":
                view = replace(view, kind="host")
            self._add(Activity.LONG_USER if on_gpu else Activity.PAUSED, view.kind, weight_s)
        recorder.state.sampled(Activity.USER, view, weight_s)

    def _add(self, after: Activity, kind: str, weight_s: float) -> None:
        self._after.setdefault(after, KindWeights())[kind] += weight_s

    def _missed(self) -> None:
        """A sample that was due in the user's code came too late: count it as what the other late samples saw."""
        total = sum(self._late.values())
        for kind, weight in self._late.items() if total else ():
            self._add(self._recorder.before_previous, kind, self._every_s * weight / total)

    def split(self, under_way: bool = False) -> Mapping[Activity, Totals[str]]:
        """Weights of the user's own time by the activity before it; ``under_way``: with the present stretch."""
        self._settle()
        split = {after: KindWeights(weights) for after, weights in self._after.items()}
        for sample in self._pending if under_way else ():
            after, view = self._judged(sample)
            split.setdefault(after, KindWeights())[view.kind] += sample.weight_s
        return split

    @property
    def none_yet(self) -> bool:
        """Whether there has been no sample of the user's own time yet."""
        return not (self._pending or self._after)

    @property
    def backward_held_up(self) -> float:
        """The share of backward in code that is not torch's."""
        return self._backward["host"] / (sum(self._backward.values()) or 1.0)

    def begin_window(self) -> None:
        """The samples so far have been used."""
        for weights in (*self._after.values(), self._backward):
            weights.begin_window()
