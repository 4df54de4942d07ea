"""Whether a script changes its data set from epoch to epoch: workers that live on would not see it.

A trial is too short to see that, so it is read from the source. A pure function over its text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator


def changes_data_set(source: str) -> int | None:
    """The line that sets something in a data set within a loop, or its epoch anywhere; None where none is seen."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    known = set(_given_to_loaders(module))
    looped = {id(node) for loop in ast.walk(module) if isinstance(loop, ast.For | ast.While) for node in ast.walk(loop)}
    for node in ast.walk(module):
        for base, attribute in _changed_by(node):
            name = ast.unparse(base)
            is_data = name in known or name.endswith("dataset")
            if is_data and (id(node) in looped or attribute == "set_epoch"):
                return int(getattr(node, "lineno", 0))
    return None


def _given_to_loaders(module: ast.Module) -> Iterator[str]:
    """The data sets that DataLoader(...) calls name."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("DataLoader"):
            named = [keyword.value for keyword in node.keywords if keyword.arg == "dataset"]
            for given in (*node.args[:1], *named):
                if isinstance(given, ast.Name | ast.Attribute):
                    yield ast.unparse(given)


def _changed_by(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Whose attribute a statement sets, by assignment or by a call of ``set_…``."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        if node.value.func.attr.startswith("set_"):
            yield node.value.func.value, node.value.func.attr
    elif isinstance(node, ast.Assign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute):
                yield target.value, target.attr
