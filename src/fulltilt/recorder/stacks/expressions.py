"""The source text of a position in bytecode, and whose C code runs there: torch's or the host's.

That is judged by the source and by the module's global names. A frame's locals are never read: before Python 3.13 that
makes a copy of all of them, which keeps a step's tensors alive until the function returns. Nor is `ast` used: in Python
3.11 two threads cannot parse at a time, and the job's own thread would fail ("AST constructor recursion depth mismatch"
in ast.literal_eval, which numpy.load calls).
"""

from __future__ import annotations

import builtins
import dis
import linecache
import re
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Literal

# Of a statement with a body (the loop itself), the first line says enough.
BODY = re.compile(r"(async |for |while |with |if |try:|def |class )")
# A # before a quotation mark may be inside of a string.
COMMENT = re.compile(r"\s+#[^'\"]*$")
LONGEST = 200
MOST_LINES = 20
# A script that compiles code as it goes must not fill the memory.
REMEMBERED = 4096

Span = tuple[int | None, int | None, int | None, int | None]


@lru_cache(REMEMBERED)
def expression_at(code: CodeType, position: int) -> str | None:
    """The source text of the expression at a bytecode position, at most one line of it; None where unknown."""
    line, end_line, column, end_column = _span_at(code, position)
    if line is None or end_line is None or column is None or end_column is None:
        return None
    lines = [linecache.getline(code.co_filename, at) for at in range(line, min(end_line, line + MOST_LINES) + 1)]
    if not lines or not lines[0]:
        return None
    lines[-1] = lines[-1].encode()[:end_column].decode(errors="replace")  # columns count bytes of UTF-8
    lines[0] = lines[0].encode()[column:].decode(errors="replace")
    if end_line > line and BODY.match(lines[0]):
        lines = [lines[0].strip().rstrip(":")]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


@lru_cache(REMEMBERED)
def shown_at(code: CodeType, position: int) -> str | None:
    """The source text at a position, for a reader: the whole line where it is a name alone.

    Where a loop jumps back, the head of the loop: a thread that runs only Python code releases the lock there, so that
    samples of the whole body fall on the jump.
    """
    text = expression_at(code, position)
    if text is not None and (text.isidentifier() or position in _turns(code)):
        text = linecache.getline(code.co_filename, line_at(code, position)).strip()[:LONGEST]
    return COMMENT.sub("", text).rstrip(":") if text is not None else None


def line_at(code: CodeType, position: int) -> int:
    """The line of the instruction at a bytecode position; between two lines, that of the whole function."""
    return _span_at(code, position)[0] or code.co_firstlineno


def _span_at(code: CodeType, position: int) -> Span:
    """First and last line, first and last column of the instruction at a bytecode position."""
    spans, at = _spans(code), _turns(code).get(position, position) // 2
    return spans[at] if 0 <= at < len(spans) else (None, None, None, None)


@lru_cache(REMEMBERED)
def _spans(code: CodeType) -> list[Span]:
    return list(code.co_positions())


@lru_cache(REMEMBERED)
def _turns(code: CodeType) -> dict[int, int]:
    """The jumps back to the head of a loop, each with the position of that head.

    In Python 3.11 the jump itself has the line of the last statement, or none.
    """
    steps = _steps(code)
    jumps = [step for step in steps.values() if "JUMP_BACKWARD" in step.opname]
    line_of = _spans(code)
    return {
        jump.offset: jump.argval
        if steps[jump.argval].opname == "FOR_ITER" or line_of[jump.offset // 2][0] is None
        else jump.offset
        for jump in jumps
    }


@lru_cache(REMEMBERED)
def _steps(code: CodeType) -> dict[int, dis.Instruction]:
    return {step.offset: step for step in dis.get_instructions(code)}


# --------------------------------------------------------------------------- whose C code

Work = Literal["torch", "host"]
Names = Mapping[str, Any]

# Tensor methods whose time is the host's: they bring values over to Python.
TO_PYTHON = frozenset({"tolist", "numpy", "item", "__array__"})
# Functions of torch's that read Python lists and numbers: slow, and no computation.
FROM_PYTHON = frozenset({"tensor", "as_tensor", "asarray", "new_tensor", "Tensor", "FloatTensor", "LongTensor"})
# Libraries with operators and methods like torch's.
ARRAYS = frozenset({"numpy", "pandas", "scipy", "polars", "sklearn", "cv2", "PIL", "skimage"})

STRING = re.compile(r"""[rbufRBUF]{0,2}(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""")
NESTED = re.compile(r"\([^][(){}]*\)|\[[^][(){}]*\]|\{[^][(){}]*\}")
# A name that is no attribute, no keyword of a call and no part of a number.
NAME = re.compile(r"(?<![\w.])[^\W\d]\w*(?!\w|\s*=(?!=))")
OPERATORS = ("BINARY_", "COMPARE_", "CONTAINS_", "UNARY_", "STORE_SUBSCR", "STORE_SLICE")
CALLS = ("CALL", "PRECALL")

# Parts of the names of instructions that the interpreter has specialized: BINARY_OP_ADD_FLOAT, COMPARE_OP_FLOAT_JUMP.
PYTHONS_OWN = frozenset({"INT", "FLOAT", "STR", "UNICODE", "LIST", "TUPLE", "DICT"})
_OPCODES: list[str] = getattr(dis, "_all_opname", dis.opname)

_works: dict[tuple[CodeType, str, int], Work | None] = {}


def work_at(code: CodeType, position: int, names: Names) -> Work | None:
    """Whose C code is called at this position; None when unknown. ``names`` are the module's globals."""
    if _is_specialized(code, position):
        return "host"
    key = (code, code.co_filename, position)  # equal code of two files is equal
    if key not in _works:
        if len(_works) >= REMEMBERED:
            _works.clear()
        _works[key] = _judge(code, position, names)
    return _works[key]


def _is_specialized(code: CodeType, position: int) -> bool:
    """Whether the interpreter has specialized this operator for Python's own numbers, texts or containers."""
    adaptive = getattr(code, "_co_code_adaptive", b"")
    if not 0 <= position < len(adaptive):
        return False
    name = _OPCODES[adaptive[position]] if adaptive[position] < len(_OPCODES) else ""
    return name.startswith(OPERATORS) and not PYTHONS_OWN.isdisjoint(name.split("_"))


def _judge(code: CodeType, position: int, names: Names) -> Work | None:
    if position in _turns(code):
        return "host"
    step, text = _steps(code).get(position), expression_at(code, position)
    if step is None or text is None:
        return None
    text = STRING.sub("#", text)
    own = _own_names(code)
    known = {name: value for name, value in dict(names).items() if name not in own}  # the script may add one meanwhile
    if step.opname.startswith(OPERATORS):
        used = {_package(known[name]) for name in NAME.findall(text) if name in known}
        return "torch" if "torch" in used else "host" if used & ARRAYS else _by_the_rest(code, known)
    if not step.opname.startswith(CALLS):
        return None
    while NESTED.search(text):
        text = NESTED.sub("#", text)
    return _work_of_call(text[:-1].split("."), code, known) if text.endswith("#") else None


def _own_names(code: CodeType) -> set[str]:
    return {*code.co_varnames, *code.co_cellvars, *code.co_freevars}


def _work_of_call(called: list[str], code: CodeType, known: Names) -> Work | None:
    """Whose work a call is, by the called name or the module that it comes from; None when unknown.

    ``called`` are a name and its attributes; a "#" after one replaces its brackets.
    """
    name, last = called[0], called[-1]
    if any(part.rstrip("#") in TO_PYTHON for part in called[1:]):
        return "host"
    if name in known and (len(called) <= 2 or _is_a(known[name], ModuleType)):
        return "torch" if _package(known[name]) == "torch" and last not in FROM_PYTHON else "host"
    if len(called) == 1:
        return "host" if name not in _own_names(code) and hasattr(builtins, name) else None
    only_tensors, arrays_too = _methods()
    return "torch" if last in only_tensors else _by_the_rest(code, known) if last in arrays_too else None


def _by_the_rest(code: CodeType, known: Names) -> Work:
    """Torch's, unless the function, or else its module, uses array libraries and never torch."""
    for used in (code.co_names, tuple(known)):
        packages = {_package(value) for name in used if _is_a(value := known.get(name), ModuleType)}
        if "torch" in packages:
            return "torch"
        if packages & ARRAYS or (used is code.co_names and "numpy" in used):
            return "host"
    return "torch"


def _package(value: Any) -> str:
    """The package of a global value, found without calling the user's code."""
    if _is_a(value, ModuleType):
        name = object.__getattribute__(value, "__dict__").get("__name__")  # a lazy module imports itself when asked
    elif _is_a(value, FunctionType, BuiltinFunctionType, type):
        name = value.__module__
    else:
        torch = sys.modules.get("torch")
        name = "torch" if torch is not None and _is_a(value, torch.Tensor) else type(value).__module__
    return name.partition(".")[0] if isinstance(name, str) else ""


def _is_a(value: Any, *kinds: type) -> bool:
    """isinstance(), without asking an object that stands for another one (a lazy one, a proxy) for its class."""
    return issubclass(type(value), kinds)


@cache
def _methods() -> tuple[frozenset[str], frozenset[str]]:
    """Method names that only tensors have, and those that arrays have, too, without those of Python's own types."""
    torch, numpy, pandas = (sys.modules.get(name) for name in ("torch", "numpy", "pandas"))
    tensors = frozenset(dir(torch.Tensor)) if torch is not None else frozenset()
    kinds = [getattr(numpy, "ndarray", None), getattr(pandas, "DataFrame", None), getattr(pandas, "Series", None)]
    arrays = frozenset(name for kind in kinds if kind is not None for name in dir(kind))
    pythons = (list, dict, set, str, bytes, tuple, int, float, re.Pattern)
    tensors -= frozenset(name for kind in pythons for name in dir(kind))
    return tensors - arrays, tensors & arrays
