"""What a thread is doing, read from its Python stack: whose code it is, which line, and whether torch is at work.

A stack sample costs about 20 µs: everything that depends only on a code position is computed once and cached. This file
also learns which frames hold the training loop.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import opcode
import os
import queue
import re
import selectors
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from fulltilt.recorder.marks import Activity
from fulltilt.recorder.stacks.expressions import REMEMBERED, expression_at, line_at, shown_at, work_at
from fulltilt.recorder.user_code import own_package, owner, shown_path

GENERATOR = 0x20  # inspect.CO_GENERATOR
GENERATOR_EXPRESSION = "<genexpr>"
CACHE, FOR_ITER = opcode.opmap["CACHE"], opcode.opmap["FOR_ITER"]
DEEPEST = 100
MODEL_CALL = "_call_impl"
# The method of torch's loaders that asks the sampler, always on the training thread.
ASKS_THE_SAMPLER = "_next_index"
# Functions that write checkpoints, which is more than torch.save (transformers renames all weights, scripts zip), and
# those that remove old ones.
SAVING = frozenset(
    {
        *("save_pretrained", "save_checkpoint", "_save_checkpoint", "save_state", "save_model"),
        *("remove_checkpoint", "_remove_checkpoint", "rotate_checkpoints", "_rotate_checkpoints"),
    }
)
NAMED_SAVING = re.compile("save|checkpoint|ckpt|snapshot")
# Parts of torch that decide alone what a stack is at.
KIND_OF_OWNER = {"torch_compile": "compile", "torch_save": "checkpoint", "torch_distributed": "communication"}
# Methods of threads and processes: waiting for their start or end brings no batch.
BRING_NO_BATCH = frozenset({"__init__", "start", "join"})
# Up to Python 3.11, f_back allocates a frame object, which may start a garbage collection. If a finalizer then releases
# the interpreter lock, the other thread returns from that very frame, and f_back reads freed memory (SIGSEGV). So it is
# off for the 20 µs of a walk. A script that turns it off itself within them finds it on again, unseen.
COLLECTS_IN_F_BACK = sys.version_info < (3, 12)
# The file of the code that imports modules.
IMPORTING = "<frozen importlib"

Spot = tuple[CodeType, int]  # a code object and the position in its bytecode
Spots = frozenset[Spot]
Codes = frozenset[CodeType]


class KnownLoop(NamedTuple):
    """What is known of the training loop (see ``LoopFrames``).

    A line at one of ``spots`` only leads into the loop (``trainer.train()``). Functions of ``loop`` hold the loop, or
    call the one that does: a generator among them makes no batches, but yields the results of training. Those of
    ``step`` hold a whole step: what they call could be moved out of it, but not they themselves.
    """

    spots: Spots = frozenset()
    loop: Codes = frozenset()
    step: Codes = frozenset()


NOTHING_KNOWN = KnownLoop()


class Stack(NamedTuple):
    """A thread's calls at one moment, the innermost first, and the global names that the innermost one sees."""

    calls: list[Spot]
    names: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StackView:
    """One sample of a thread: the kind of its work, the user's line that caused it, and the expression there."""

    kind: str
    where: str
    function: str
    call: str | None
    in_model: bool = False  # a model was called
    in_optimizer: bool = False
    sampling: bool = False  # a loader's sampler was at work
    waits: bool = False  # for another thread or process
    # A generator of the user's that the training loop iterates: the line of the loop, the generator, the expression.
    drawn_from: tuple[str, str, str | None] | None = None
    called_at: tuple[str, str, str | None] | None = None  # the same for a function, not a model, that the loop calls
    inside: str | None = None  # library functions that the line led to

    @property
    def of_training(self) -> bool:
        """Whether a model or an optimizer was called."""
        return self.in_model or self.in_optimizer


def stack_of(thread_id: int) -> Stack | None:
    """The stack of a thread; None when it has ended.

    No frame is kept: a frame that is held when its function returns keeps the function's objects alive, and frees them
    on the wrong thread.
    """
    global _collects_later
    collects = _collects_later = COLLECTS_IN_F_BACK and gc.isenabled()
    if collects:
        gc.disable()
    try:
        frame: FrameType | None = sys._current_frames().get(thread_id)
        if frame is None:
            return None
        names = frame.f_globals
        calls: list[Spot] = []
        while frame is not None and len(calls) < DEEPEST:
            calls.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return Stack(calls, names)
    finally:
        if collects:
            gc.enable()
            _collects_later = False


def _after_fork() -> None:
    if _collects_later:
        gc.enable()


_collects_later = False  # a process that is forked while a stack is walked has to collect, too
os.register_at_fork(after_in_child=_after_fork)


def user_code_in_backward(stack: Stack) -> bool:
    """Whether backward has called code that is not torch's (a hook, a function with a backward of its own)."""
    theirs = False
    for code, _ in stack.calls:
        who = owner(code.co_filename)
        if who == "torch" and code.co_name == "backward" and "/torch/autograd/" in code.co_filename:
            return theirs
        theirs = theirs or who in ("user", "site")
    return False


def view_of(stack: Stack, inside: CodeType | None = None, known: KnownLoop = NOTHING_KNOWN) -> StackView | None:
    """What a thread with this stack was doing, and on which line of the user's.

    Only calls made by ``inside`` count; None when the thread has left it already. Instead of a line that only leads
    into the training loop a library's line is named.
    """
    calls = stack.calls
    if inside is not None and not any(code is inside for code, _ in calls):
        return None
    top = calls[0]
    if "fulltilt.cli" in sys.modules:
        # What led to our own command line, as when a recipe trains, costs the training nothing.
        calls = [top, *takewhile(lambda spot: own_package(spot[0].co_filename) != "cli", calls[1:])]
    top_owner = owner(top[0].co_filename)
    seen = _read_frames(calls, inside, known)
    # The Python inside a library's model is part of what the model costs; only a model of the user's can be changed.
    kind = seen.kind or ("torch" if seen.in_library_module else _kind(top, stack.names, top_owner, seen.in_module))
    drawn_from = None
    if seen.kind is None and seen.generator is not None and not seen.in_module:
        drawn_from = _drawn_from(calls, seen.generator)
        if kind != "torch":
            kind = "data_wait"
    waits = kind in ("host", "data_wait") and top[0].co_filename in _waiting_files()
    # Who waits, or draws from a library's iterator, waits for a batch, unless loaders bring them.
    if kind == "host" and (seen.in_library_iterator or (waits and _may_bring_a_batch(calls))):
        kind = "waiting"
    others = (spot for spot in calls if owner(spot[0].co_filename) != "fulltilt")
    library = (seen.called_library if kind == "host" else None) or seen.library
    spot = seen.user or library or seen.into_loop or next(others, top)
    called_at, within, line = None, None, seen.loop_line
    could_move = (kind == "host" and not seen.in_module) or (kind == "torch" and not seen.calls_module)
    if could_move and line is not None and line is not spot:
        called_at = _shown(line), line[0].co_qualname, shown_at(*line)
    if seen.called is not None and seen.innermost is not None:
        within = _within(seen.called[0], seen.innermost)
    elif spot is library and seen.library is not None:
        within = _within(spot[0], seen.library[0])
    of_line = _shown(spot), spot[0].co_qualname, shown_at(*spot)
    return StackView(
        kind, *of_line, seen.in_model, seen.in_optimizer, seen.sampling, waits, drawn_from, called_at, within
    )


@dataclass(slots=True)
class _Frames:
    """What the frames of a stack show, from the innermost one outwards."""

    user: Spot | None = None  # the innermost line of the user's that does more than lead into the loop
    library: Spot | None = None  # the innermost of an installed package
    called_library: Spot | None = None  # the outermost of a package that the loop's own package calls
    into_loop: Spot | None = None  # the innermost that only leads into the loop
    loop_line: Spot | None = None  # the innermost of the loop, or of a function that holds a step
    calls_module: bool = False  # a module is what the line of the loop calls
    called: Spot | None = None  # the library's function that the user's line calls,
    innermost: CodeType | None = None  # and the innermost one that led to
    generator: int | None = None  # how deep the generator of the user's lies that makes batches
    in_module: bool = False
    in_library_module: bool = False
    in_library_iterator: bool = False
    in_model: bool = False
    in_optimizer: bool = False
    sampling: bool = False
    kind: str | None = None  # where one frame alone decides it


def _read_frames(calls: list[Spot], inside: CodeType | None, known: KnownLoop) -> _Frames:
    into_loop, loop, step = known
    seen, top_owner = _Frames(), owner(calls[0][0].co_filename)
    for depth, spot in enumerate(calls):
        code = spot[0]
        if code is inside:
            break
        who = owner(code.co_filename)
        if seen.user is None and who in ("site", "stdlib"):
            seen.called = spot
        if who == "torch_module":
            if not seen.in_module and seen.user is None and seen.library is not None:
                seen.in_library_module = True
            seen.in_module = True
            seen.in_model = seen.in_model or code.co_name == MODEL_CALL
        elif who == "torch":
            seen.in_optimizer = seen.in_optimizer or _is_an_optimizers(code.co_filename)
        elif who == "torch_data":
            seen.sampling = seen.sampling or code.co_name == ASKS_THE_SAMPLER
            if code.co_name == "_shutdown_workers":
                seen.kind = "epoch_turnover"
        elif who == "stdlib":
            # Paid once, by whoever needs it first: often the first save. But a script may train as it is imported.
            if code.co_filename.startswith(IMPORTING) and spot not in into_loop:
                seen.kind = "import"
            elif code is deepcopy.__code__:
                seen.kind = seen.kind or "host"  # weights kept aside: torch's work, but no part of the step
        elif who == "site":
            if code.co_name in SAVING or "/safetensors/" in code.co_filename:
                seen.kind = seen.kind or "checkpoint"
            seen.library = seen.library or spot
            if seen.user is None and _package(code.co_filename) not in _packages(loop):
                seen.called_library = spot
            if not seen.in_module and code not in loop and _is_drawn_from(code, calls[depth + 1 :]):
                seen.in_library_iterator = True
        elif who == "user":
            of_loop = code in loop
            if spot in into_loop:
                seen.into_loop = seen.into_loop or spot
            else:
                if seen.user is None and seen.called is not None:
                    seen.innermost = (seen.library or seen.called)[0]
                seen.user = seen.user or spot
                if seen.loop_line is None and (of_loop or code in step):
                    seen.loop_line = spot
                    seen.calls_module = depth > 0 and owner(calls[depth - 1][0].co_filename) == "torch_module"
            if code.co_name in SAVING or (not of_loop and _saves(code)):
                seen.kind = seen.kind or "checkpoint"
            if not seen.in_module and not of_loop and _is_drawn_from(code, calls[depth + 1 :]):
                seen.generator = depth
        elif who in KIND_OF_OWNER and (who != "torch_distributed" or top_owner == who):
            seen.kind = seen.kind or KIND_OF_OWNER[who]
    return seen


def _drawn_from(calls: list[Spot], generator: int) -> tuple[str, str, str | None] | None:
    """The user's line that draws from the generator at this depth, the generator, and what the line iterates."""
    drawing = next((spot for spot in calls[generator + 1 :] if owner(spot[0].co_filename) == "user"), None)
    if drawing is None:
        return None
    text = expression_at(*drawing) or ""
    iterated = text.partition(" in ")[2] if text.startswith("for ") else text  # Python 3.11 has all of the for
    return _shown(drawing), calls[generator][0].co_qualname, iterated or None


@lru_cache(REMEMBERED)
def _package(filename: str) -> str:
    return shown_path(filename).partition("/")[0]


@lru_cache(4)  # while the loop is learnt it changes a few times
def _packages(loop: Codes) -> frozenset[str]:
    return frozenset(_package(code.co_filename) for code in loop)


@lru_cache(REMEMBERED)
def _within(called: CodeType, inner: CodeType) -> str:
    """The function of a library's that is called, and the innermost one: ``json/__init__.py:load``."""
    shown = []
    for code in dict.fromkeys((called, inner)):
        path = Path(code.co_filename)
        own = "/".join(path.parts[-2:]) if owner(code.co_filename) == "stdlib" else shown_path(code.co_filename)
        shown.append(f"{own}:{code.co_qualname}")
    return " ".join(shown)


@lru_cache(REMEMBERED)
def _saves(code: CodeType) -> bool:
    """Whether a function of the user's saves checkpoints, by its name and by what it calls."""
    return NAMED_SAVING.search(code.co_name) is not None and {"torch", "save"} <= {*code.co_names}


def _shown(spot: Spot) -> str:
    return f"{shown_path(spot[0].co_filename)}:{line_at(*spot)}"


def _kind(top: Spot, names: Mapping[str, Any], top_owner: str, in_module: bool) -> str:
    if top_owner in ("torch", "torch_module"):
        return "torch"
    if top_owner in ("torch_data", "torch_tools"):
        return "host"
    if top_owner == "torch_distributed":
        return "communication"
    return work_at(*top, names) or ("torch" if in_module else "host")


@cache
def _waiting_files() -> frozenset[str]:
    """The files of the standard library in which a thread waits for another thread or process."""
    folder = Path(multiprocessing.__file__).parent
    files = (folder / f"{name}.py" for name in ("connection", "popen_fork", "queues", "synchronize"))
    return frozenset({threading.__file__, queue.__file__, selectors.__file__, subprocess.__file__, *map(str, files)})


def _may_bring_a_batch(calls: list[Spot]) -> bool:
    library = takewhile(lambda code: owner(code.co_filename) == "stdlib", (code for code, _ in calls))
    return not any(code.co_name in BRING_NO_BATCH or code.co_filename == subprocess.__file__ for code in library)


def _is_drawn_from(code: CodeType, callers: list[Spot]) -> bool:
    """Whether this function makes batches: a generator, or a class's ``__next__``."""
    return code.co_name == "__next__" or bool(code.co_flags & GENERATOR and not _makes_no_batches(code, callers))


def _makes_no_batches(code: CodeType, callers: list[Spot]) -> bool:
    """Whether this generator is no source of batches: a context manager, or all of one call, ``sum(x for x in xs)``."""
    if not callers:
        return False
    caller, position = callers[0]
    if caller.co_filename == contextlib.__file__:
        return True
    while position > 0 and caller.co_code[position] == CACHE:  # Python 3.12 points after the instruction
        position -= 2
    if caller.co_code[position] == FOR_ITER:
        return caller.co_name == GENERATOR_EXPRESSION and _makes_no_batches(caller, callers[1:])
    return code.co_name == GENERATOR_EXPRESSION and not (expression_at(*callers[0]) or "").startswith("next(")


@cache
def _is_an_optimizers(filename: str) -> bool:
    averages = filename.endswith("/swa_utils.py")  # averaged weights are not the optimizer's
    return "/torch/optim/" in filename and not averages


def users_line(into_loop: Spots = frozenset()) -> tuple[str, str]:
    """file:line and function of the innermost code of the user's outside ``into_loop``, or else of a library's."""
    outside: tuple[str, str] | None = None
    for frame in callers(sys._getframe(2)):
        code = frame.f_code
        who = owner(code.co_filename)
        if who == "user" and (code, frame.f_lasti) not in into_loop:
            return shown_line(frame), code.co_qualname
        if who == "site" and outside is None:
            outside = shown_line(frame), code.co_qualname
        if who == "fulltilt" and own_package(code.co_filename) == "cli":
            break
    return outside or ("unknown:0", "unknown")


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame of the calling thread, the one that called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def shown_line(frame: FrameType) -> str:
    """The file and line of a frame of the calling thread."""
    return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"


# --------------------------------------------------------------------------- the frames of the training loop

PARTS_OF_A_STEP = frozenset({Activity.DATA_WAIT, Activity.BACKWARD, Activity.OPTIMIZER})
EVERY_STEP_HAS = (Activity.BACKWARD, Activity.OPTIMIZER)
SAMPLES_AT_EACH = 3


class LoopFrames:
    """Learns in the first steps, on the training thread, what view_of and users_line know of the training loop.

    Where a library owns the loop, the script's line is always the same (``trainer.train()``) and says nothing. Such
    lines are on the stack in backward, in the optimizer and in next() alike; lines of the loop are not.
    """

    def __init__(self) -> None:
        self.known = NOTHING_KNOWN
        self.learning = True
        self._stacks: dict[Activity, list[Spots]] = {}

    @property
    def spots(self) -> Spots:
        """The calls that lead into the loop."""
        return self.known.spots

    @property
    def loop(self) -> Codes:
        """The functions that hold the loop, and their callers."""
        return self.known.loop

    def see(self, activity: Activity, frame: FrameType | None) -> None:
        """Take in the stack at the beginning of an activity, if it is a part of a step."""
        if activity not in PARTS_OF_A_STEP or len(self._stacks.get(activity, ())) == SAMPLES_AT_EACH:
            return
        here = frozenset((caller.f_code, caller.f_lasti) for caller in callers(frame))
        self._stacks.setdefault(activity, []).append(here)
        if len(self._stacks) > 1:
            stacks = [stack for seen in self._stacks.values() for stack in seen]
            self.known = self.known._replace(spots=frozenset.intersection(*stacks), loop=_functions_in_all(stacks))
        of_steps = [self._stacks.get(part, []) for part in EVERY_STEP_HAS]
        if all(of_steps):
            self.known = self.known._replace(step=_functions_in_all([one for seen in of_steps for one in seen]))
        self.learning = any(len(seen) < SAMPLES_AT_EACH for seen in of_steps)


def _functions_in_all(stacks: list[Spots]) -> Codes:
    return frozenset.intersection(*(frozenset(code for code, _ in stack) for stack in stacks))
