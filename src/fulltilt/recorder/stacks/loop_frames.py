"""Which frames hold the training loop, and which an evaluation.

Where a library owns the loop, the script's line that costs the time is always the same (``trainer.train()``), and says
nothing. Such lines are on the stack at backward, in the optimizer and at next() alike; lines of the loop are not.
"""

from __future__ import annotations

import weakref
from types import CodeType, FrameType
from typing import Any

from fulltilt.recorder.marks import Activity
from fulltilt.recorder.stacks.frames import GENERATOR, Spot, Stack, is_model_call, spots
from fulltilt.recorder.user_code import owner

PARTS_OF_A_STEP = frozenset({Activity.DATA_WAIT, Activity.BACKWARD, Activity.OPTIMIZER})
EVERY_STEP_HAS = (Activity.BACKWARD, Activity.OPTIMIZER)
SAMPLES_AT_EACH = 3


class LoopFrames:
    """Learns in the first steps, on the training thread, which calls lead into the loop.

    ``loop`` are the functions that hold it, and those that called them: whatever they are, they make no batches.
    """

    def __init__(self) -> None:
        self.spots: frozenset[Spot] = frozenset()
        self.loop: frozenset[CodeType] = frozenset()
        self.learning = True
        self._common: frozenset[Spot] | None = None
        self._holding: frozenset[CodeType] | None = None
        self._seen: dict[Activity, int] = {}

    def see(self, activity: Activity, frame: FrameType) -> None:
        """Take in the stack at the beginning of an activity, if it is a part of a step."""
        if activity not in PARTS_OF_A_STEP or self._seen.get(activity, 0) == SAMPLES_AT_EACH:
            return
        here = spots(frame)
        functions = frozenset(code for code, _ in here)
        self._common = here if self._common is None else self._common & here
        self._holding = functions if self._holding is None else self._holding & functions
        self._seen[activity] = self._seen.get(activity, 0) + 1
        if len(self._seen) > 1:
            self.spots, self.loop = self._common, self._holding
        self.learning = any(self._seen.get(part, 0) < SAMPLES_AT_EACH for part in EVERY_STEP_HAS)


class Evaluation:
    """What is known of the evaluation under way: the model, the function that switched it, and the one that draws."""

    def __init__(self) -> None:
        self.declared = False
        self._model: weakref.ref[Any] | None = None
        self._switching: CodeType | None = None
        self._drawing: CodeType | None = None

    @property
    def in_sight(self) -> bool:
        """Whether samples can tell when it is over. What the user declares ends where the user says so."""
        return not self.declared and (self._model is not None or self._drawing is not None)

    def declare(self, on: bool) -> None:
        """The user says that it begins or ends here."""
        self.forget()
        self.declared = on

    def switched(self, model: Any, frame: FrameType | None) -> None:
        """The trained model was switched to evaluation mode, by the function with this frame or by one behind it."""
        self._model, self._drawing = weakref.ref(model), None
        self._switching = function_that_switches(model, frame)

    def drew(self, frame: FrameType | None) -> None:
        """A batch was drawn for it, by the function with this frame or by one that called it."""
        self._drawing = function_that_draws(frame)

    def forget(self) -> None:
        """The job trains again."""
        self._model = self._switching = self._drawing = None

    def goes_on(self, stack: Stack) -> bool:
        """Whether the thread with this stack still evaluates."""
        model = self._model() if self._model is not None else None
        if model is not None and model.training:
            return False
        return self._drawing is None or any(
            code is self._drawing or code is self._switching or is_model_call(code) for code, _ in stack.calls
        )


def function_that_switches(model: Any, frame: FrameType | None) -> CodeType | None:
    """The function of the user's that switched the model; None where a library did."""
    while frame is not None:
        who = owner(frame.f_code.co_filename)
        if who == "site":
            return None
        if who == "user" and not _is_switch_of(model, frame):
            return frame.f_code
        frame = frame.f_back
    return None


def _is_switch_of(model: Any, frame: FrameType) -> bool:
    """Whether this is the model's own ``train`` or ``eval``, which a class may have instead of torch's."""
    code = frame.f_code
    return code.co_name in ("train", "eval") and frame.f_locals.get(*code.co_varnames[:1] or ("",)) is model


def function_that_draws(frame: FrameType | None) -> CodeType | None:
    """The innermost function of the user's that draws batches here; None where only libraries do.

    A generator only hands batches on: the function that draws from it does something with them.
    """
    while frame is not None:
        code = frame.f_code
        if owner(code.co_filename) == "user" and not code.co_flags & GENERATOR:
            return code
        frame = frame.f_back
    return None
