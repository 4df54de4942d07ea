"""What the names of a function's own are assigned, read from its source."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from types import CodeType

from fulltilt.recorder.expressions import REMEMBERED, last_line

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
