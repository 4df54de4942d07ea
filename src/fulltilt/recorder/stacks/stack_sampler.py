"""The observer's samples of the training thread's stack: which lines cost time, and how the user's own time divides."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from fulltilt.recorder.attribution import Seen
from fulltilt.recorder.loaders import TappedIterator
from fulltilt.recorder.marks import Activity
from fulltilt.recorder.stacks.frames import (
    StackView,
    in_backward_or_optimizer,
    stack_of,
    user_code_in_backward,
    view_of,
)
from fulltilt.recorder.step_sampling import LONG_STEP_NS

if TYPE_CHECKING:
    from fulltilt.recorder.recorder import Recorder

# A window needs this many samples before its own split is trusted over that of the whole run.
ENOUGH_SAMPLES = 20


@dataclass
class KindWeights:
    """Stack samples of one sort of the user's own time, by kind: those of the present window, and those before it."""

    enough: int
    window: dict[str, float] = field(default_factory=dict)
    in_window: int = 0
    overall: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, weight_s: float) -> None:
        """Put a sample in."""
        self.window[kind] = self.window.get(kind, 0.0) + weight_s
        self.in_window += 1

    def split(self) -> dict[str, float]:
        """How this time divides, by the samples of the window, or of the whole run when they are few."""
        return dict(self.window) if self.in_window >= self.enough else self._all()

    def _all(self) -> dict[str, float]:
        kinds = self.overall.keys() | self.window.keys()
        return {kind: self.overall.get(kind, 0.0) + self.window.get(kind, 0.0) for kind in kinds}

    def empty(self) -> None:
        """The samples of the window have been used."""
        self.overall = self._all()
        self.window.clear()
        self.in_window = 0


class WeightsAfter:
    """Stack samples of the user's own time, by the activity that it came after."""

    def __init__(self) -> None:
        self._after: dict[Activity, KindWeights] = {}

    def add(self, after: Activity, kind: str, weight_s: float) -> None:
        """Put a sample in."""
        self._after.setdefault(after, KindWeights(ENOUGH_SAMPLES)).add(kind, weight_s)

    def split(self) -> Seen:
        """How this time divides."""
        return {after: weights.split() for after, weights in self._after.items()}

    @property
    def in_window(self) -> int:
        """How many samples there were in the present window."""
        return sum(weights.in_window for weights in self._after.values())

    @property
    def seen(self) -> bool:
        """Whether there ever was a sample."""
        return bool(self._after)

    def empty(self) -> None:
        """The samples of the window have been used."""
        for weights in self._after.values():
            weights.empty()


SAMPLE_EVERY_S = 0.01
# A short run has few samples to divide its time by: at first they come twice as often.
EARLY_SAMPLES, EARLY_SAMPLE_EVERY_S = 400, 0.005
# While the recorder rests, one sample in so many names the line; the others would cost more than they tell.
SAMPLE_AT_REST_EVERY = 4
# A sample is late when it had to wait for the interpreter lock.
LATE_NS = 300_000
NS = 1e-9


class StackSample(NamedTuple):
    """A sample of the step under way; ``view`` where it shows later whose work it was."""

    after: Activity
    kind: str
    weight_s: float
    view: StackView | None = None


class StackSampler:
    """Takes stack samples, each weighted by the time it stands for. Steps that take long are kept apart."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last_ns = time.perf_counter_ns()
        self._every_s = EARLY_SAMPLE_EVERY_S
        self.usual = WeightsAfter()
        self.apart = WeightsAfter()
        self.backward = KindWeights(ENOUGH_SAMPLES)
        self._late: dict[str, float] = {}
        self._at_rest = 0
        self._taken = 0
        # The samples of the step under way: whether it takes long shows later.
        self._step_ns = 0
        self._in_step: list[StackSample] = []
        self._takes_long = False
        # Stack samples of which it shows later whose work they saw, and the weights that they belong in.
        self._undecided: list[tuple[WeightsAfter, StackSample, StackView]] = []
        self._after_step_s = self._after_step_in_model_s = 0.0

    @property
    def usually_every_s(self) -> float:
        """How long to wait for the next sample where sampling costs little."""
        return EARLY_SAMPLE_EVERY_S if self._taken < EARLY_SAMPLES else SAMPLE_EVERY_S

    def take(self, due_ns: int, every_s: float) -> None:
        """One sample of the training thread's stack, due at ``due_ns``, that stands for ``every_s``."""
        self._every_s = every_s
        self._taken += self._recorder.training
        now_ns = time.perf_counter_ns()
        since_sample_ns, self._last_ns = now_ns - self._last_ns, now_ns
        recorder = self._recorder
        activity = recorder.activity
        if activity is Activity.REST:
            self._take_at_rest(now_ns, since_sample_ns)
            return
        if recorder.evaluation.in_sight and activity is Activity.USER:
            self._look_for_its_end()
        training = recorder.training and not recorder.state.evaluating(recorder.eval_mode)
        if activity is Activity.BACKWARD and training and recorder.clock is None:
            self._take_in_backward()
            return
        slipped = activity is not Activity.USER and recorder.left is Activity.USER
        if training and slipped and recorder.last_switch_ns > due_ns:
            self._missed(now_ns)
        if not training or not (activity is Activity.USER or recorder.state.wants_lines(activity)):
            return
        after = recorder.left
        stack = stack_of(recorder.thread_id or 0)
        if stack is None or activity is not recorder.activity:
            return
        fetching = TappedIterator.__next__.__code__ if activity is Activity.DATA_WAIT else None
        view = view_of(stack, fetching, recorder.loop_frames.spots, recorder.loop_frames.loop)
        if view is None:
            return
        # A sample that came late (the interpreter lock was held) stands for all of that time, but not for time
        # before the present activity began.
        since_switch_ns = now_ns - recorder.last_switch_ns
        on_time = since_sample_ns < 2e9 * every_s
        weight_s = every_s if on_time else max(min(since_sample_ns, since_switch_ns), 0) * NS
        view = recorder.state.understood(view)
        behind_step = activity is Activity.USER and after is Activity.OPTIMIZER
        if behind_step:
            self._after_step_s += weight_s
            self._after_step_in_model_s += weight_s * view.of_training
        undecided = behind_step and self._is_undecided(view)
        if not undecided:
            recorder.state.sampled(activity, view, weight_s)
        if activity is Activity.USER:
            self._add(StackSample(after, view.kind, weight_s, view if undecided else None), recorder.step_ns, now_ns)
            if now_ns - due_ns > LATE_NS:
                self._late[view.kind] = self._late.get(view.kind, 0.0) + weight_s

    def _look_for_its_end(self) -> None:
        """See whether the evaluation under way is over, or goes on after all."""
        recorder = self._recorder
        stack = stack_of(recorder.thread_id or 0)
        if stack is None or recorder.activity is not Activity.USER or not recorder.evaluation.in_sight:
            return
        on = recorder.evaluation.goes_on(stack)
        if on != recorder.state.evaluating(recorder.eval_mode):
            recorder.evaluates(on)

    def _is_undecided(self, view: StackView) -> bool:
        """Whether it shows later what this was for: torch's work for a forward pass, or a generator's for a batch.

        What torch does on a GPU is the GPU's time.
        """
        return not view.of_training and (
            view.kind == "data_wait" or (view.kind == "torch" and self._recorder.clock is None)
        )

    def _take_in_backward(self) -> None:
        """Most of backward is torch's; a hook, or a function with a backward of its own, may hold it up.

        On a GPU it runs on a thread of torch's, and what the host does there is hidden behind the GPU's work.
        """
        recorder = self._recorder
        stack = stack_of(recorder.thread_id or 0)
        if stack is None or recorder.activity is not Activity.BACKWARD:
            return
        view = view_of(stack, None, recorder.loop_frames.spots) if user_code_in_backward(stack) else None
        view = recorder.state.understood(view) if view is not None else None
        if view is not None and view.kind == "host":
            recorder.state.sampled(Activity.USER, view, self._every_s)
        self._add_in_backward(view, self._every_s)

    def _add_in_backward(self, view: StackView | None, weight_s: float) -> None:
        self.backward.add("host" if view is not None and view.kind == "host" else "torch", weight_s)

    def _take_at_rest(self, now_ns: int, since_sample_ns: int) -> None:
        """Between bursts of measuring fewer samples are taken; at a step that takes long, all of them."""
        recorder = self._recorder
        began_ns = recorder.rest.booked_ns
        takes_long = now_ns - began_ns > LONG_STEP_NS and recorder.clock is None
        self._at_rest += 1
        if not takes_long and self._at_rest % SAMPLE_AT_REST_EVERY:
            return
        stack = stack_of(recorder.thread_id or 0)
        if stack is None or recorder.activity is not Activity.REST:
            return
        weight_s = SAMPLE_AT_REST_EVERY * self._every_s
        view = view_of(stack, TappedIterator.at_rest.__code__)
        if view is not None:
            if recorder.state.wants_lines(Activity.DATA_WAIT):
                recorder.state.sampled(Activity.DATA_WAIT, view, weight_s)
            return
        view = view_of(stack, None, recorder.loop_frames.spots, recorder.loop_frames.loop)
        if view is None:
            return
        view = recorder.state.understood(view)
        if takes_long:
            # The first sample of a long step stands for all of it so far.
            weight_s = (since_sample_ns if began_ns == self._step_ns else now_ns - began_ns) * NS
        theirs = user_code_in_backward(stack)
        if theirs is not None and not takes_long:
            self._add_in_backward(view if theirs else None, weight_s)
        elif takes_long or not in_backward_or_optimizer(stack):
            self._add(StackSample(Activity.REST, view.kind, weight_s), began_ns, now_ns)
        recorder.state.sampled(Activity.USER, view, weight_s)

    def _add(self, taken: StackSample, step_ns: int, now_ns: int) -> None:
        if step_ns != self._step_ns:
            self._settle()
            self._step_ns = step_ns
        self._in_step.append(taken)
        self._takes_long = now_ns - step_ns > LONG_STEP_NS

    def _settle(self) -> None:
        """The step whose samples were held back is over. How long it took is known if no other has ended since."""
        recorder = self._recorder
        if recorder.previous_step_ns == self._step_ns:
            self._takes_long = recorder.step_ns - self._step_ns > LONG_STEP_NS
        # On a GPU no step is booked apart: it is the GPU's time that is divided.
        weights = self.apart if self._takes_long and recorder.clock is None else self.usual
        for taken in self._in_step:
            if taken.view is None:
                weights.add(taken.after, taken.kind, taken.weight_s)
            else:
                self._undecided.append((weights, taken, taken.view))
        self._in_step.clear()
        self._takes_long = False

    def _decide(self) -> None:
        """Say of each sample behind a step whose work it saw: the marks since then tell what came next."""
        if not self._undecided:
            return
        in_model_share = self._after_step_in_model_s / (self._after_step_s or 1.0)
        own = self._recorder.after_step.is_the_scripts_own(in_model_share)
        for weights, taken, view in self._undecided:
            kind = "host" if own else taken.kind
            self._recorder.state.sampled(Activity.USER, replace(view, kind=kind), taken.weight_s)
            weights.add(taken.after, kind, taken.weight_s)
        self._undecided.clear()

    def _missed(self, now_ns: int) -> None:
        """A sample that was due in the user's own code came when that had ended: the interpreter lock was held.

        It stands for such code as other late samples did see.
        """
        total = sum(self._late.values())
        for kind, weight in self._late.items() if total else ():
            missed = StackSample(self._recorder.left_after, kind, self._every_s * weight / total)
            self._add(missed, self._recorder.step_ns, now_ns)

    def splits(self) -> tuple[Seen, Seen]:
        """How the user's own time divides in most steps, and in what takes long."""
        if self._takes_long or self._step_ns != self._recorder.step_ns:
            self._settle()
        self._decide()
        usual, apart = self.usual.split(), self.apart.split()
        return usual, apart or usual

    @property
    def none_yet(self) -> bool:
        """Whether the user's own time was never looked at."""
        return not (self._in_step or self._undecided or self.usual.seen or self.apart.seen)

    def begin_window(self) -> None:
        """The samples so far have been used."""
        self.usual.empty()
        self.apart.empty()
        self.backward.empty()
