"""Whether the job validates: when a validation ends, and which switches to evaluation mode are not validation."""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from fulltilt.recorder.marks import Activity, EvalMode, Point
from fulltilt.recorder.stacks.frames import GENERATOR, MODEL_CALL, Stack, callers, shown_line
from fulltilt.recorder.user_code import owner

if TYPE_CHECKING:
    from fulltilt.recorder.loaders.registry import LoaderRegistry

# A function that has switched the model during a training batch this often makes training data.
GENERATES_AFTER = 3
# With gradients off for less than this, a metric is computed or weights are averaged.
SHORTEST_EVALUATION_NS = 5_000_000
REMEMBERED_STEPS = 5


class Evaluation:
    """The evaluation under way: its model, the function that switched it, and the one that draws batches."""

    def __init__(self) -> None:
        self.declared = False
        self.seen = 0  # how often one was seen
        self.where: str | None = None  # the line of the training loop, or around it, that leads to one
        self._model: weakref.ref[Any] | None = None
        self._switching: CodeType | None = None
        self._drawing: CodeType | None = None
        # The positions of the training loop and its callers: an earlier one later on means their next iteration.
        self._reached: dict[CodeType, int] = {}

    @property
    def in_sight(self) -> bool:
        """Whether samples can show that it is over; one that the user declared ends where the user says so."""
        return not self.declared and (self._model is not None or self._drawing is not None)

    def declare(self, on: bool) -> None:
        """The user says that it begins or ends here."""
        self.forget()
        self.declared = on
        self.seen += on

    def switched(self, model: Any, frame: FrameType | None, loop: frozenset[CodeType] = frozenset()) -> None:
        """The trained model was switched to evaluation mode, by this frame or one of its callers."""
        self.where = self.where or line_in(loop, frame)
        self._model, self._drawing = weakref.ref(model), None
        self._switching = function_that_switches(model, frame)
        self._reached = positions_in(loop, frame)
        self.seen += 1

    def drew(self, frame: FrameType | None, loop: frozenset[CodeType] = frozenset()) -> None:
        """A batch was drawn for it, by this frame or one of its callers."""
        self.where = self.where or line_in(loop, frame)
        self._drawing = function_that_draws(frame)
        here = positions_in(loop, frame) if self._reached else {}
        self._reached = {code: min(position, here.get(code, position)) for code, position in self._reached.items()}
        self.seen += 1

    def forget(self) -> None:
        """The job trains again."""
        self._model = self._switching = self._drawing = None
        self._reached = {}

    def goes_on(self, stack: Stack) -> bool:
        """Whether the thread with this stack still evaluates."""
        model = self._model() if self._model is not None else None
        if model is not None and vars(model).get("training"):  # on the observer's thread: as it is stored
            return False
        # Of a function that calls itself the outermost call: a library may run the validation as it runs the training.
        if any(position < self._reached.get(code, 0) for code, position in dict(stack.calls).items()):
            return False
        return self._drawing is None or any(
            code is self._drawing
            or code is self._switching
            or (code.co_name == MODEL_CALL and owner(code.co_filename) == "torch_module")
            for code, _ in stack.calls
        )


def positions_in(loop: frozenset[CodeType], frame: FrameType | None) -> dict[CodeType, int]:
    """The bytecode positions of these functions; of one that calls itself, of the outermost call."""
    return {caller.f_code: caller.f_lasti for caller in callers(frame) if caller.f_code in loop}


def line_in(loop: frozenset[CodeType], frame: FrameType | None) -> str | None:
    """The user's line in the innermost of these functions among this frame's callers; None where there is none."""
    innermost = next((caller for caller in callers(frame) if caller.f_code in loop), None)
    if innermost is None or owner(innermost.f_code.co_filename) != "user":
        return None
    return shown_line(innermost)


def function_that_switches(model: Any, frame: FrameType | None) -> CodeType | None:
    """The function of the user's that switched the model; None where a library did."""
    for caller in callers(frame):
        code = caller.f_code
        who = owner(code.co_filename)
        if who == "site":
            return None
        # Not the model's own ``train`` or ``eval``: a class may override torch's.
        its_own = code.co_name in ("train", "eval") and caller.f_locals.get(*code.co_varnames[:1] or ("",)) is model
        if who == "user" and not its_own:
            return code
    return None


def function_that_draws(frame: FrameType | None) -> CodeType | None:
    """The innermost function of the user's, no generator, that draws batches; None where only libraries do."""
    codes = (caller.f_code for caller in callers(frame))
    return next((code for code in codes if owner(code.co_filename) == "user" and not code.co_flags & GENERATOR), None)


# --------------------------------------------------------------------------- gradients off


class GradientsOff:
    """Finds evaluations that switch no model and draw no batch, such as generated samples.

    They are stretches with gradients off that last longer than a step, and a batch is drawn next. Where backward comes
    next (a teacher, generated texts), or a loader was made of the result (rollouts), they are part of training. A place
    in the code counts as an evaluation until it is found to be something else, and never again from then on.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._others: set[tuple[CodeType, int]] = set()  # places that do not evaluate
        self._under_way: tuple[Any, tuple[CodeType, int], int] | None = None
        self._undecided: dict[tuple[CodeType, int], str | None] = {}  # and the line of the loop that leads there
        self._loaders_made = 0
        self._stepped_ns: dict[int, int] = {}  # when each optimizer stepped last
        self._steps_ns: deque[int] = deque(maxlen=REMEMBERED_STEPS)

    def began(self, context: Any, frame: FrameType) -> None:
        """``context``, entered in this frame, has switched gradients off."""
        recorder, loaders = self._recorder, self._recorder.state.loaders
        trains = loaders.feeding is not None and loaders.feeding.trains and not loaders.drawn_elsewhere
        place = (frame.f_code, frame.f_lasti)
        if not (trains and self._steps_ns) or place in self._others or not recorder.on_training_thread():
            return
        if recorder.activity not in (Activity.USER, Activity.PAUSED):  # a data set's or an optimizer's
            self._others.add(place)
            return
        recorder.resume()
        recorder.evaluation.seen += 1
        self._under_way = (context, place, time.perf_counter_ns())
        self._undecided[place] = line_in(recorder.loop_frames.loop, frame)
        self._evaluates(True)

    def ended(self, context: Any) -> None:
        """``context`` has switched gradients on again."""
        if self._under_way is None or self._under_way[0] is not context:
            return
        _, place, began_ns = self._under_way
        self._under_way = None
        self._loaders_made = self._recorder.state.loaders.made
        self._evaluates(False)
        if time.perf_counter_ns() - began_ns < max(min(self._steps_ns), SHORTEST_EVALUATION_NS):
            self._is_another(place)

    def is_seen_otherwise(self) -> None:
        """A model is switched, a batch drawn or backward called: whatever is under way is judged by that."""
        if self._under_way is not None:
            place, self._under_way = self._under_way[1], None
            self._evaluates(False)
            self._is_another(place)

    def stepped(self, optimizer_id: int) -> None:
        """An optimizer has stepped: what is done at each step takes less than the time since its last one."""
        now_ns = time.perf_counter_ns()
        if (before_ns := self._stepped_ns.get(optimizer_id)) is not None:
            self._steps_ns.append(now_ns - before_ns)
        self._stepped_ns[optimizer_id] = now_ns

    def trains(self) -> None:
        """backward() is called."""
        self.is_seen_otherwise()
        for place in tuple(self._undecided):
            self._is_another(place)

    def batch_drawn(self) -> None:
        """The next batch for training was drawn."""
        if not self._undecided:
            return
        if self._recorder.state.loaders.made != self._loaders_made:
            self.trains()
        evaluation = self._recorder.evaluation
        evaluation.where = evaluation.where or next(iter(self._undecided.values()), None)
        self._undecided.clear()

    def _is_another(self, place: tuple[CodeType, int]) -> None:
        self._undecided.pop(place, None)
        self._others.add(place)

    def _evaluates(self, on: bool) -> None:
        recorder = self._recorder
        recorder.eval_mode = recorder.state.loaders.was_evaluating = on
        recorder.switch(recorder.activity, EvalMode(on), Point.EVAL)


# --------------------------------------------------------------------------- rollouts, pseudo-labels


@dataclass
class Generation:
    """Functions that switch the model to make training data, between a batch and its backward: texts, pseudo-labels."""

    _seen: Counter[CodeType] = field(default_factory=Counter)
    _under_way: tuple[CodeType, int] | None = None

    def began(self, loaders: LoaderRegistry, frame: FrameType) -> None:
        """A function switches the trained model to evaluation mode."""
        code = _switching_code(frame)
        waits = loaders.feeding is not None and loaders.feeding.trains and loaders.unused
        self._under_way = (code, _drawn_for_evaluation(loaders)) if code is not None and waits else None

    def ended(self, loaders: LoaderRegistry) -> None:
        """The model is back in training mode."""
        if self._under_way is not None:
            code, drawn = self._under_way
            self._under_way = None
            if drawn == _drawn_for_evaluation(loaders):
                self._seen[code] += 1

    def is_rollout(self, loaders: LoaderRegistry, module: Any, frame: FrameType) -> bool:
        """Whether the model is switched to make training data, as libraries for reinforcement learning do.

        There, no loader brings data. A user's script without a loader may well validate.
        """
        if self._seen and (code := _switching_code(frame)) is not None and self._seen[code] >= GENERATES_AFTER:
            return True
        return not any(stats.trains for stats in loaders.all) and function_that_switches(module, frame) is None


def _drawn_for_evaluation(loaders: LoaderRegistry) -> int:
    return sum(stats.eval_batches for stats in loaders.all)


def _switching_code(frame: FrameType | None) -> CodeType | None:
    codes = (caller.f_code for caller in callers(frame))
    return next((code for code in codes if not owner(code.co_filename).startswith("torch")), None)
