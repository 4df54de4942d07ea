"""What else a literal stands for: a number that is also the batch size must not change with the workers.

Needs libcst; imported late.
"""

from __future__ import annotations

import libcst as cst

from fulltilt.tune.source_tree import SourceTree, last_name, literal


def used_otherwise(tree: SourceTree, argument: cst.BaseExpression, value: cst.BaseExpression) -> int | None:
    """The line that also computes, counts or sizes a batch with what ``argument`` names; None where none is seen.

    ``value`` is the literal behind it. Comparisons and calls do not count: ``if n > 0``, ``print(n)``, ``make(ds, n)``;
    ``range(n)`` and ``items[n]`` do.
    """
    names = {_key(argument), *_assigned_names(tree, value)} - {None}
    for node in tree.nodes:
        if isinstance(node, cst.Name | cst.SimpleString) and _key(node) in names and _counts(tree, node):
            return tree.begins(node)
    return None


def _key(node: cst.CSTNode) -> str | None:
    """``n`` for ``n``, ``cfg.n`` and ``cfg["n"]``."""
    if isinstance(node, cst.Subscript) and len(node.slice) == 1 and isinstance(node.slice[0].slice, cst.Index):
        return _key(node.slice[0].slice.value)
    if isinstance(node, cst.SimpleString):
        text = literal(node)
        return text if isinstance(text, str) else None
    return last_name(node) if isinstance(node, cst.BaseExpression) else None


def _assigned_names(tree: SourceTree, value: cst.BaseExpression) -> list[str | None]:
    """``a`` and ``b`` for the value of ``a = b = 2``."""
    home = next(tree.above(value), None)
    return [last_name(each.target) for each in home.targets] if isinstance(home, cst.Assign) else []


def _counts(tree: SourceTree, name: cst.CSTNode) -> bool:
    """Whether a name stands in a sum or a product, counts or picks something, or gives a batch its size."""
    below = name
    for node in tree.above(name):
        if isinstance(node, cst.BinaryOperation):
            return not isinstance(node.left, cst.BaseString)  # "%d workers" % n
        if isinstance(node, cst.Index | cst.Slice) and isinstance(name, cst.Name):
            return True  # a key, as in cfg["n"], picks nothing
        if isinstance(node, cst.Arg):
            return below is node.value and (_sizes_a_batch(tree, node) or _counts_off(tree, node))
        if isinstance(node, cst.Assign):
            return below is node.value and any("batch" in (last_name(each.target) or "") for each in node.targets)
        if isinstance(node, cst.BaseStatement | cst.Comparison):
            return False
        below = node
    return False


def _counts_off(tree: SourceTree, argument: cst.Arg) -> bool:
    call = next(tree.above(argument))
    return isinstance(call, cst.Call) and last_name(call.func) in ("range", "islice")


def _sizes_a_batch(tree: SourceTree, argument: cst.Arg) -> bool:
    call = next(tree.above(argument))
    if argument.keyword is not None:
        return "batch" in argument.keyword.value
    if not isinstance(call, cst.Call) or argument.star:
        return False
    return (last_name(call.func) or "").endswith("DataLoader") and call.args.index(argument) == 1
