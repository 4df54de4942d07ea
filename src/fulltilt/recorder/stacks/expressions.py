"""The source text behind a position in bytecode, and whose C code runs there: torch's, another library's or Python's.

It is told from the source and from what the module's global names stand for. A frame's locals are never read: before
Python 3.13 that leaves a copy of them all behind, which keeps a step's tensors alive until the function returns, and
while the frame returns they may be freed at that very moment.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Literal

# Of a statement with a body (the loop itself), the first line says enough.
BODY = re.compile(r"(async |for |while |with |if |try:|def |class )")
# A quotation mark behind the # may end a string that it stands in.
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
    lines = [
        linecache.getline(code.co_filename, number) for number in range(line, min(end_line, line + MOST_LINES) + 1)
    ]
    if not lines or not lines[0]:
        return None
    # Columns count bytes of UTF-8.
    if end_line == line:
        text = lines[0].encode()[column:end_column].decode(errors="replace")
    else:
        lines[-1] = lines[-1].encode()[:end_column].decode(errors="replace")
        lines[0] = lines[0].encode()[column:].decode(errors="replace")
        text = lines[0].strip().rstrip(":") if BODY.match(lines[0]) else " ".join(part.strip() for part in lines)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


@lru_cache(REMEMBERED)
def shown_at(code: CodeType, position: int) -> str | None:
    """The source text that tells a reader what happens at a position: a name alone (one stored to) tells nothing."""
    text = expression_at(code, position)
    if text is not None and text.isidentifier():
        text = linecache.getline(code.co_filename, line_at(code, position)).strip()[:LONGEST]
    return COMMENT.sub("", text).rstrip(":") if text is not None else None


def line_at(code: CodeType, position: int) -> int:
    """The line of the instruction at a bytecode position; between two lines, that of the whole function."""
    return _span_at(code, position)[0] or code.co_firstlineno


def _span_at(code: CodeType, position: int) -> Span:
    """First and last line, first and last column of the instruction at a bytecode position."""
    spans = _spans(code)
    return spans[position // 2] if 0 <= position // 2 < len(spans) else (None, None, None, None)


@lru_cache(REMEMBERED)
def _spans(code: CodeType) -> list[Span]:
    return list(code.co_positions())


def last_line(code: CodeType) -> int:
    """The last line of a function, with the functions inside it."""
    own = (end for _, end, _, _ in code.co_positions() if end is not None)
    inner = (last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return max((code.co_firstlineno, *own, *inner))


# A function longer than this is not read: parsing holds the interpreter lock.
LONGEST_LINES = 600


def values_of(code: CodeType, name: str) -> list[ast.expr]:
    """The expressions whose values a function assigns to a name; empty where nothing is known."""
    return _assigned(code, code.co_filename).get(name, [])


@lru_cache(REMEMBERED)
def _assigned(code: CodeType, filename: str) -> dict[str, list[ast.expr]]:
    # The file is named beside the code, because equal code of two files is equal.
    first, last = code.co_firstlineno, last_line(code)
    if code.co_name.startswith("<") or last - first > LONGEST_LINES:
        return {}
    lines = [linecache.getline(filename, number) for number in range(first, last + 1)]
    indented = lines[0][:1] in (" ", "\t")
    try:
        tree = ast.parse("".join(["if True:\n", *lines] if indented else lines))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _assign(target, node.value, found)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            _assign(node.target, node.value, found)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            # As good as a value that was made by calling the annotated type.
            found.setdefault(node.arg, []).append(ast.Call(node.annotation, [], []))
    return found


def _assign(target: ast.expr, value: ast.expr, found: dict[str, list[ast.expr]]) -> None:
    if isinstance(target, ast.Name):
        found.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple | ast.List):
        # What unpacks is of the kind of its parts: a tensor's method that returns two gives two tensors.
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else [value] * len(target.elts)
        for part, its_value in zip(target.elts, parts, strict=False):
            _assign(part, its_value, found)


Work = Literal["torch", "host"]
# What made a value: torch, a library of arrays (or another one), or Python itself.
Maker = Literal["torch", "library", "python"]
Names = Mapping[str, Any]

# Tensor methods whose time is the host's: they bring values over to Python.
TO_PYTHON = frozenset({"tolist", "numpy", "item", "__array__"})
# Functions of torch's that walk through lists and numbers of Python's: slow, and no computation.
FROM_PYTHON = frozenset({"tensor", "as_tensor", "asarray", "new_tensor", "Tensor", "FloatTensor", "LongTensor"})
# Libraries with operators and methods like torch's.
ARRAYS = frozenset({"numpy", "pandas", "scipy", "polars", "sklearn", "cv2", "PIL", "skimage"})
# Where the types of Python's own values are at home.
PYTHON = frozenset({"builtins", "_thread", "re", "collections", "_io"})
# What follows a name on and on ends here.
DEEPEST = 4

_works: dict[tuple[CodeType, str, int], Work | None] = {}


def work_at(code: CodeType, position: int, names: Names) -> Work | None:
    """Whose C code is called at this very position; None when nothing tells. ``names`` are the module's globals."""
    key = (code, code.co_filename, position)  # equal code of two files is equal
    if key not in _works:
        if len(_works) >= REMEMBERED:
            _works.clear()
        _works[key] = _judge(code, position, names)
    return _works[key]


def _judge(code: CodeType, position: int, names: Names) -> Work | None:
    try:
        body = ast.parse(expression_at(code, position) or "").body
    except (SyntaxError, ValueError, RecursionError):
        return None
    if not body:
        return None
    node = body[0].value if isinstance(body[0], ast.Expr) else body[0]
    return _Reading(code, names).work_of(node)


class _Reading:
    """Reads one expression of one function."""

    def __init__(self, code: CodeType, names: Names) -> None:
        self._code = code
        self._names = names
        self._own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        self._following: list[str] = []

    def work_of(self, node: ast.AST) -> Work | None:
        """Who works when the outermost operation of an expression is carried out."""
        if isinstance(node, ast.Call) and _name_of(node.func) in FROM_PYTHON and self._called(node.func) == "torch":
            return "host"
        maker = self._made_by(node)
        if maker is not None:
            return "torch" if maker == "torch" else "host"
        if isinstance(node, ast.Call) and (self._global(node.func) or self._global(_object_of(node.func))):
            return "host"  # a function or an object that is known, and not torch's
        return self._company() if _might_be_a_tensors(node) else None

    # ------------------------------------------------------------------ what the expression itself tells

    def _made_by(self, node: ast.AST) -> Maker | None:
        """Whose code makes the value of an expression, as far as that is certain."""
        if isinstance(node, ast.Call):
            return self._called(node.func)
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Attribute | ast.Subscript):
            return "torch" if self._made_by(node.value) == "torch" else None
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp):
            return "python"
        # A tensor makes the result of an operation a tensor, an array makes it an array.
        makers = {self._made_by(part) for part in _parts(node)}
        return next((maker for maker in ("torch", "library", None, "python") if maker in makers), None)

    def _called(self, function: ast.expr) -> Maker | None:
        if not isinstance(function, ast.Attribute):
            return self._made_by(function) if isinstance(function, ast.Name) else None
        if function.attr in TO_PYTHON:
            return "library"
        root = self._value(_root_of(function))
        if isinstance(root, ModuleType):
            return _maker_of(root)
        maker = self._made_by(function.value)
        if maker is not None or self._global(function.value):
            return maker
        return "torch" if function.attr in _only_tensors_have() else None

    def _global(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id not in self._own and node.id in self._names

    def _value(self, node: ast.expr) -> Any:
        """What a global name stands for; None for anything else."""
        return self._names[node.id] if isinstance(node, ast.Name) and self._global(node) else None

    def _named(self, name: str) -> Maker | None:
        if name in self._own:
            return self._assigned(name)
        if name in self._names:
            return _maker_of(self._names[name])
        return "python" if hasattr(builtins, name) else None

    def _assigned(self, name: str) -> Maker | None:
        """What made the values of a name of the function's own, if all that is known of them agrees."""
        if name in self._following or len(self._following) == DEEPEST:
            return None
        self._following.append(name)
        makers = {self._made_by(value) for value in values_of(self._code, name)} - {None}
        self._following.pop()
        return makers.pop() if len(makers) == 1 else None

    # ------------------------------------------------------------------ what stands around it

    def _company(self) -> Work:
        """Torch's, unless the function, or else its module, speaks of arrays and never of torch."""
        for used in (self._code.co_names, tuple(self._names)):
            packages = {_package(self._names.get(name)) for name in used}
            if "torch" in packages:
                return "torch"
            if packages & ARRAYS:
                return "host"
        return "torch"


def _might_be_a_tensors(node: ast.AST) -> bool:
    """Whether it looks like work on a tensor. Operators on Python's own values never let another thread look."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in _tensors_and_arrays_have()
    return isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare | ast.Subscript | ast.AugAssign)


def _name_of(function: ast.expr) -> str | None:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def _object_of(function: ast.expr) -> ast.expr:
    return function.value if isinstance(function, ast.Attribute) else function


def _root_of(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _parts(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.BinOp):
        return (node.left, node.right)
    if isinstance(node, ast.UnaryOp):
        return (node.operand,)
    if isinstance(node, ast.Compare):
        return (node.left, *node.comparators)
    if isinstance(node, ast.AugAssign):
        return (node.target, node.value)
    if isinstance(node, ast.Tuple | ast.BoolOp):
        return node.elts if isinstance(node, ast.Tuple) else node.values
    if isinstance(node, ast.IfExp):
        return (node.body, node.orelse)
    return ()


def _maker_of(value: Any) -> Maker | None:
    """Whose a global value is. Nothing of the user's own is called to find out."""
    if isinstance(value, ModuleType):
        return "torch" if _package(value) == "torch" else "library"
    if isinstance(value, FunctionType | BuiltinFunctionType | type):
        return "torch" if _first(value.__module__) == "torch" else None
    torch = sys.modules.get("torch")
    home = _first(type(value).__module__)
    if home == "torch" or (torch is not None and issubclass(type(value), torch.Tensor)):
        return "torch"
    return "library" if home in ARRAYS else "python" if home in PYTHON else None


def _package(value: Any) -> str | None:
    return _first(value.__name__) if isinstance(value, ModuleType) else None


def _first(name: Any) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


@cache
def _only_tensors_have() -> frozenset[str]:
    """Method names that give a tensor away."""
    return _tensors_have() - _arrays_have() - _pythons_own_have()


@cache
def _tensors_and_arrays_have() -> frozenset[str]:
    return (_tensors_have() & _arrays_have()) - _pythons_own_have()


def _tensors_have() -> frozenset[str]:
    torch = sys.modules.get("torch")
    return frozenset(dir(torch.Tensor)) if torch is not None else frozenset()


def _arrays_have() -> frozenset[str]:
    arrays = sys.modules.get("numpy")
    frames = sys.modules.get("pandas")
    kinds = [getattr(arrays, "ndarray", None), getattr(frames, "DataFrame", None), getattr(frames, "Series", None)]
    return frozenset(name for kind in kinds if kind is not None for name in dir(kind))


def _pythons_own_have() -> frozenset[str]:
    kinds = (list, dict, set, str, bytes, tuple, int, float, re.Pattern)
    return frozenset(name for kind in kinds for name in dir(kind))
