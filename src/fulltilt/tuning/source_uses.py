"""What else a literal stands for: a number that is also the batch size, or a seed, must not change with the workers.

Needs libcst; imported late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import libcst as cst

from fulltilt.tuning.source_loaders import POSITIONS, parameters
from fulltilt.tuning.source_tree import SourceTree, last_name, literal

# Calls that tell a number and train nothing, arguments that only say how it is loaded, and calls that hand it on.
_TELLING = (
    *("print", "log", "info", "debug", "warn", "error", "write", "format", "echo", "bool"),
    *("add_argument", "set_defaults"),
)
_OF_LOADING = ("worker", "prefetch", "pin_memory", "persist", "thread", "proc", "job")
_HANDING_ON = frozenset({"int", "min", "max", "abs", "round"})

# A name that is followed, and the function or class it means that in; None: all of the file.
Named = tuple[str, cst.CSTNode | None]


class Uses:
    """Asks one module what else it does with the value of a setting. ``is_loader``: whether a call makes a loader."""

    def __init__(self, tree: SourceTree, is_loader: Callable[[cst.Call], bool]) -> None:
        self._tree = tree
        self._is_loader = is_loader

    def otherwise(self, setting: str, argument: cst.BaseExpression, value: cst.BaseExpression) -> int | None:
        """The line that also computes, counts or seeds with what ``argument`` names; None where none is seen.

        ``value`` is the literal behind it. Comparisons and what only tells it do not count: ``if n > 0``, ``print(n)``.
        It is followed into the functions of this file that it is given to, and into other names.
        """
        todo: list[Named] = [(name, None) for name in {_key(argument), *_assigned_names(self._tree, value)} if name]
        seen: set[Named] = set()
        while todo:
            name, scope = named = todo.pop()
            if named in seen:
                continue
            seen.add(named)
            for node in self._tree.nodes:
                if not isinstance(node, cst.Name | cst.SimpleString) or _key(node) != name:
                    continue
                if scope is not None and scope not in self._tree.above(node):
                    continue
                if self._counts(setting, node):
                    return self._tree.begins(node)
                todo += self._called_there(node)
        return None

    def _counts(self, setting: str, name: cst.CSTNode) -> bool:
        """Whether a name stands in a sum or a product, counts or picks something, or is given to a call that might."""
        below = name
        for node in self._tree.above(name):
            if isinstance(node, cst.BinaryOperation):
                return not isinstance(node.left, cst.BaseString)  # "%d workers" % n
            if isinstance(node, cst.Index | cst.Slice) and isinstance(name, cst.Name):
                return True  # a key, as in cfg["n"], picks nothing
            if isinstance(node, cst.IfExp) and below is node.test:
                return False
            if isinstance(node, cst.Arg) and (below is not node.value or not self._hands_on(node)):
                return below is node.value and self._counts_there(setting, node)
            if isinstance(node, cst.Assign):
                return below is node.value and any("batch" in (last_name(each.target) or "") for each in node.targets)
            if isinstance(node, cst.BaseStatement | cst.Comparison | cst.FormattedString | cst.BaseDict | cst.Param):
                return False
            below = node
        return False

    def _counts_there(self, setting: str, argument: cst.Arg) -> bool:
        call = next(self._tree.above(argument))
        if not isinstance(call, cst.Call) or argument.star:
            return False
        name = argument.keyword.value if argument.keyword is not None else None
        if self._is_loader(call):
            place = call.args.index(argument)
            return (name or (POSITIONS[place] if place < len(POSITIONS) else None)) != setting
        if name is not None and ("batch" in name or any(part in name for part in _OF_LOADING)):
            return "batch" in name
        if name == setting or self._parameter(argument) is not None:
            return False
        return not any(part in (last_name(call.func) or "").lower() for part in _TELLING)

    def _hands_on(self, argument: cst.Arg) -> bool:
        call = next(self._tree.above(argument))
        return isinstance(call, cst.Call) and last_name(call.func) in _HANDING_ON

    # ------------------------------------------------------------------ other names of the same value

    def _called_there(self, node: cst.CSTNode) -> Iterator[Named]:
        """``m`` for ``m = n`` and ``self.m = n``, and the parameter of a function of this file that ``n`` is given."""
        below = node
        for above in self._tree.above(node):
            if isinstance(above, cst.Attribute | cst.BooleanOperation):
                below = above
                continue
            if isinstance(above, cst.Arg) and below is above.value and (given := self._parameter(above)) is not None:
                yield given
            elif isinstance(above, cst.Assign) and below is above.value:
                for target in (each.target for each in above.targets):
                    if isinstance(target, cst.Name):
                        yield target.value, self._tree.home(above)
                    elif isinstance(target, cst.Attribute):
                        yield target.attr.value, self._tree.class_around(above)
            return

    def _parameter(self, argument: cst.Arg) -> Named | None:
        """The parameter of a function or class of this file that an argument becomes."""
        call = next(self._tree.above(argument))
        name = last_name(call.func) if isinstance(call, cst.Call) else None
        if not isinstance(call, cst.Call) or argument.star or any(arg.star for arg in call.args):
            return None
        for node in self._tree.nodes:
            if not isinstance(node, cst.FunctionDef):
                continue
            owner = self._tree.home(node)
            is_method = isinstance(owner, cst.ClassDef)
            made = owner.name.value if isinstance(owner, cst.ClassDef) and node.name.value == "__init__" else None
            if name == (made or node.name.value):
                known = parameters(node, whole=not is_method)
                if argument.keyword is not None:
                    return (argument.keyword.value, node) if argument.keyword.value in known else None
                place = call.args.index(argument)
                return (known[place], node) if place < len(known) else None
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
