"""What a thread is doing, read from its Python stack: whose code it is, which line, and whether torch is at work.

A stack sample costs about 20 µs: everything that depends only on a code position is worked out once and remembered.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import opcode
import queue
import selectors
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from fulltilt.recorder.stacks.expressions import expression_at, line_at, shown_at, work_at
from fulltilt.recorder.user_code import owner, shown_path
from fulltilt.records import HotLine

# Of threads and processes: waiting for their beginning or their end brings no batch.
BRING_NONE = frozenset({"__init__", "start", "join"})


@cache
def _waiting_rooms() -> frozenset[str]:
    processes = Path(multiprocessing.__file__).parent
    rooms = (processes / f"{name}.py" for name in ("connection", "popen_fork", "queues", "synchronize"))
    return frozenset({threading.__file__, queue.__file__, selectors.__file__, subprocess.__file__, *map(str, rooms)})


def waits_for_others(code: CodeType) -> bool:
    """Whether a thread in this code waits."""
    return code.co_filename in _waiting_rooms()


def may_bring_a_batch(codes: Sequence[CodeType]) -> bool:
    """Whether a wait may end with a batch, by the stack from its innermost call on."""
    library = takewhile(lambda code: owner(code.co_filename) == "stdlib", codes)
    return not any(code.co_name in BRING_NONE or code.co_filename == subprocess.__file__ for code in library)


GENERATOR = 0x20  # inspect.CO_GENERATOR
GENERATOR_EXPRESSION = "<genexpr>"
CACHE, FOR_ITER = opcode.opmap["CACHE"], opcode.opmap["FOR_ITER"]
DEEPEST = 100
MODEL_CALL = "_call_impl"

# The method of torch's loaders that asks the sampler: the training thread does that, with workers as without.
ASKS_THE_SAMPLER = "_next_index"

# How the writing of checkpoints is called: it is more than torch.save (transformers renames all weights, scripts zip).
SAVING = frozenset({"save_pretrained", "save_checkpoint", "_save_checkpoint", "save_state", "save_model"})

Spot = tuple[CodeType, int]  # a code object and the position in its bytecode


class Stack(NamedTuple):
    """A thread's calls at one moment, the innermost first, and the global names that the innermost one sees."""

    calls: list[Spot]
    names: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StackView:
    """One sample of a thread: the kind of its work, the user's line that caused it, and the expression there.

    ``of_training``: a model or an optimizer was called, and not some function of torch's alone. ``sampling``: a
    loader's sampler was at work. ``waits``: for another thread or process.
    """

    kind: str
    where: str
    function: str
    call: str | None
    of_training: bool = False
    sampling: bool = False
    waits: bool = False


def stack_of(thread_id: int) -> Stack | None:
    """The stack of a thread; None when it has ended.

    It is taken down at once and no frame is kept: a frame that is held when its function returns keeps what the
    function held alive, and lets it go on the wrong thread.
    """
    frame: FrameType | None = sys._current_frames().get(thread_id)
    if frame is None:
        return None
    names = frame.f_globals
    calls: list[Spot] = []
    while frame is not None and len(calls) < DEEPEST:
        calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return Stack(calls, names)


def is_model_call(code: CodeType) -> bool:
    """Whether this is the function of torch's through which every module is called."""
    return code.co_name == MODEL_CALL and owner(code.co_filename) == "torch_module"


def in_backward_or_optimizer(stack: Stack) -> bool:
    """Whether torch's backward or an optimizer's step is at work, rather than code of the user's inside it."""
    for code, _ in stack.calls:
        who = owner(code.co_filename)
        if who == "user":
            return False
        if who == "torch":
            path = code.co_filename.replace("\\", "/")
            if "/torch/optim/" in path and code.co_name != "zero_grad":
                return True
            if "/torch/autograd/" in path and code.co_name == "backward":
                return True
    return False


def user_code_in_backward(stack: Stack) -> bool | None:
    """Whether backward has called code that is not torch's (a hook, a function with a backward of its own).

    None when backward is not running.
    """
    theirs = False
    for code, _ in stack.calls:
        who = owner(code.co_filename)
        if who == "torch" and code.co_name == "backward" and "/torch/autograd/" in code.co_filename.replace("\\", "/"):
            return theirs
        theirs = theirs or who in ("user", "site")
    return None


def spots(frame: FrameType | None) -> frozenset[Spot]:
    """The positions of all calls on the stack whose innermost frame this is."""
    found: list[Spot] = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return frozenset(found)


def view_of(
    stack: Stack,
    inside: CodeType | None = None,
    loop_frames: frozenset[Spot] = frozenset(),
    loop: frozenset[CodeType] = frozenset(),
) -> StackView | None:
    """What a thread with this stack was doing, and on which line of the user's.

    Only calls made by ``inside`` count; None when the thread has left it already. A line of ``loop_frames`` is not
    named where a library's line says more: it only led into the training loop (``trainer.train()``). A generator that
    is one of ``loop`` makes no batches: it yields what training brings.
    """
    calls = _since_the_command(stack.calls)
    if inside is not None and not any(code is inside for code, _ in calls):
        return None
    top = calls[0]
    top_owner = owner(top[0].co_filename)
    user: Spot | None = None
    outside: Spot | None = None
    in_loop: Spot | None = None
    in_module = in_generator = in_library_module = of_training = sampling = False
    special: str | None = None
    for depth, spot in enumerate(calls):
        code = spot[0]
        if code is inside:
            break
        who = owner(code.co_filename)
        if who == "torch_module":
            in_library_module = in_library_module or (not in_module and user is None and outside is not None)
            in_module = True
            of_training = of_training or is_model_call(code)
        elif who == "torch_compile":
            special = special or "compile"
        elif who == "torch_save":
            special = special or "checkpoint"
        elif who == "torch_data":
            sampling = sampling or code.co_name == ASKS_THE_SAMPLER
            if code.co_name == "_shutdown_workers":
                special = "epoch_turnover"
        elif code is deepcopy.__code__:
            special = special or "host"  # weights kept aside: torch's work, but no part of the step
        elif who == "torch_distributed" and top_owner == who:
            special = special or "communication"
        elif who == "site":
            if "/safetensors/" in code.co_filename or code.co_name in SAVING:
                special = special or "checkpoint"
            outside = outside or spot
        elif who == "torch":
            of_training = of_training or _is_an_optimizers(code.co_filename)
        elif who == "user":
            if spot in loop_frames:
                in_loop = in_loop or spot
            else:
                user = user or spot
            if code.co_name in SAVING:
                special = special or "checkpoint"
            if not in_module and _is_drawn_from(code, calls[depth + 1 :]) and code not in loop:
                in_generator = True
    others = (spot for spot in calls if owner(spot[0].co_filename) != "fulltilt")
    named = user or outside or in_loop or next(others, top)
    # The Python inside a library's model is part of what the model costs; only a model of the user's can be changed.
    kind = special or ("torch" if in_library_module else _kind(top, stack.names, top_owner, in_module))
    if kind != "torch" and special is None and in_generator and not in_module:
        kind = "data_wait"
    waits = kind in ("host", "data_wait") and waits_for_others(top[0])
    if kind == "host" and waits and may_bring_a_batch([code for code, _ in calls]):
        kind = "waiting"
    return _view(named, kind, of_training, sampling, waits)


def _is_drawn_from(code: CodeType, callers: list[Spot]) -> bool:
    """Whether this function makes batches: a generator, or the iterator of a class of the user's."""
    return code.co_name == "__next__" or bool(code.co_flags & GENERATOR and not _makes_no_batches(code, callers))


def _makes_no_batches(code: CodeType, callers: list[Spot]) -> bool:
    """Whether nobody draws from this generator.

    All of it goes into one call, ``sum(f(x) for x in xs)``, or it is a context manager.
    """
    if not callers:
        return False
    caller, position = callers[0]
    if caller.co_filename == contextlib.__file__:
        return True
    while position > 0 and caller.co_code[position] == CACHE:  # Python 3.12 stands behind the instruction
        position -= 2
    if caller.co_code[position] == FOR_ITER:
        return caller.co_name == GENERATOR_EXPRESSION and _makes_no_batches(caller, callers[1:])
    return code.co_name == GENERATOR_EXPRESSION and not (expression_at(*callers[0]) or "").startswith("next(")


def _since_the_command(calls: list[Spot]) -> list[Spot]:
    """Calls without those that led to our own command line, as when a recipe trains: they cost the training nothing."""
    for depth, (code, _) in enumerate(calls):
        if depth and _is_command_line(code.co_filename):
            return calls[:depth]
    return calls


@cache
def _is_an_optimizers(filename: str) -> bool:
    path = filename.replace("\\", "/")
    return "/torch/optim/" in path and not path.endswith("/swa_utils.py")  # averaged weights are not the optimizer's


@cache
def _is_command_line(filename: str) -> bool:
    return owner(filename) == "fulltilt" and "/fulltilt/cli/" in filename.replace("\\", "/")


def _view(spot: Spot, kind: str, of_training: bool, sampling: bool, waits: bool) -> StackView:
    code, position = spot
    where = f"{shown_path(code.co_filename)}:{line_at(code, position)}"
    return StackView(kind, where, code.co_qualname, shown_at(code, position), of_training, sampling, waits)


def _kind(top: Spot, names: Mapping[str, Any], top_owner: str, in_module: bool) -> str:
    if top_owner in ("torch", "torch_module"):
        return "torch"
    if top_owner in ("torch_data", "torch_tools"):
        return "host"
    if top_owner == "torch_distributed":
        return "communication"
    return work_at(*top, names) or ("torch" if in_module else "host")


def users_line(loop_frames: frozenset[Spot] = frozenset()) -> tuple[str, str]:
    """file:line and function of the innermost code that is the user's, or at least not torch's or ours.

    A line of the user's that only leads into a library's training loop is passed over, and so is the script that starts
    our own command line when a recipe trains.
    """
    frame: FrameType | None = sys._getframe(2)
    outside: tuple[str, str] | None = None
    while frame is not None and not _is_command_line(frame.f_code.co_filename):
        code = frame.f_code
        who = owner(code.co_filename)
        if who == "user" and (code, frame.f_lasti) not in loop_frames:
            return f"{shown_path(code.co_filename)}:{frame.f_lineno}", code.co_qualname
        if who == "site" and outside is None:
            outside = f"{shown_path(code.co_filename)}:{frame.f_lineno}", code.co_qualname
        frame = frame.f_back
    return outside or ("unknown:0", "unknown")


MOST_LINES = 4096


class LineTimes:
    """Adds up seconds by line. Memory is bounded: when full, the cheaper half is forgotten.

    A line that holds several calls is shown with the costliest of them.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], float] = {}
        # For each line what its calls cost, and whether they wait.
        self._calls: dict[tuple[str, str], dict[tuple[str | None, bool], float]] = {}

    def add(self, view: StackView, seconds: float) -> None:
        """Charge a line with some seconds."""
        self.charge(view.where, view.function, seconds, view.call, view.waits)

    def charge(self, where: str, function: str, seconds: float, call: str | None = None, waits: bool = False) -> None:
        """Charge a line, given by its parts."""
        key = (where, function)
        if key not in self._seconds and len(self._seconds) >= MOST_LINES:
            kept = sorted(self._seconds.items(), key=lambda item: -item[1])[: MOST_LINES // 2]
            self._seconds = dict(kept)
            self._calls = {kept_key: self._calls[kept_key] for kept_key, _ in kept}
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        calls = self._calls.setdefault(key, {})
        calls[call, waits] = calls.get((call, waits), 0.0) + seconds

    def merge(self, lines: Iterable[HotLine]) -> None:
        """Add lines that another process measured."""
        for line in lines:
            self.charge(line.where, line.function, line.seconds, line.call, line.waits)

    def take(self) -> tuple[HotLine, ...]:
        """The costliest lines so far; starts again from nothing."""
        top = self.top(20)
        self._seconds.clear()
        self._calls.clear()
        return top

    def top(self, most: int = 12, stretch: float = 1.0) -> tuple[HotLine, ...]:
        """The costliest lines, first the costliest, their seconds times ``stretch``."""
        ranked = sorted(self._seconds.items(), key=lambda item: (-item[1], item[0]))[:most]
        return tuple(HotLine(*key, seconds * stretch, *_costliest(self._calls[key])) for key, seconds in ranked)


def _costliest(calls: dict[tuple[str | None, bool], float]) -> tuple[str | None, bool]:
    """The call that cost most, if one is known at all."""
    return max(calls, key=lambda each: (each[0] is not None, calls[each]))
