"""A module of the user's as a tree that can be asked: where nodes stand, what they stand in, what they say.

Needs libcst; imported late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from fulltilt.tuning.source_layout import Replacing

MISSING = object()


class SourceTree:
    """One module with the positions and parents of its nodes."""

    def __init__(self, module: cst.Module) -> None:
        wrapper = MetadataWrapper(module)
        self._module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self.nodes = list(self._positions)
        self.calls = [node for node in self.nodes if isinstance(node, cst.Call)]
        self.classes = {node.name.value: node for node in self.nodes if isinstance(node, cst.ClassDef)}

    def begins(self, node: cst.CSTNode) -> int:
        """The line on which a node begins."""
        return int(self._positions[node].start.line)

    def ends(self, node: cst.CSTNode) -> int:
        """The line on which a node ends."""
        return int(self._positions[node].end.line)

    def code(self, node: cst.CSTNode) -> str:
        """A node as it is written."""
        return self._module.code_for_node(node)

    def home(self, node: cst.CSTNode) -> cst.FunctionDef | cst.ClassDef | None:
        """The function or class that a node stands in; None at the top of the module."""
        parent = self._parents.get(node)
        while parent is not None and not isinstance(parent, cst.FunctionDef | cst.ClassDef):
            parent = self._parents.get(parent)
        return parent

    def class_around(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """The innermost class that a node stands in."""
        home = self.home(node)
        while home is not None and not isinstance(home, cst.ClassDef):
            home = self.home(home)
        return home

    def heirs(self, home: cst.ClassDef) -> list[cst.ClassDef]:
        """A class with those of this module that inherit from it."""
        found = [home]
        for each in self.classes.values():
            if each not in found and any(last_name(base.value) in [h.name.value for h in found] for base in each.bases):
                found.append(each)
        return found

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """What a node stands in, the nearest first."""
        parent = self._parents.get(node)
        while parent is not None:
            yield parent
            parent = self._parents.get(parent)

    def returned(self, function: str) -> list[cst.BaseExpression | None]:
        """What the function of this name returns, one expression for each return; none if there is not one such."""
        named = [node for node in self.nodes if isinstance(node, cst.FunctionDef) and node.name.value == function]
        if len(named) != 1 or self.home(named[0]) is not None:
            return []
        return [node.value for node in self.nodes if isinstance(node, cst.Return) and self.home(node) is named[0]]

    def replaced(self, replacements: Mapping[cst.CSTNode, cst.CSTNode]) -> str:
        """The source with these nodes exchanged."""
        return self._module.visit(Replacing(replacements)).code


def literal(node: cst.BaseExpression) -> object:
    """The value of a number, a string, True, False or None; MISSING for anything else."""
    if isinstance(node, cst.Integer | cst.SimpleString):
        return node.evaluated_value
    if isinstance(node, cst.Name) and node.value in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[node.value]
    return MISSING


def dotted(node: cst.BaseExpression) -> str | None:
    """``a.b.c`` for a name and its attributes; None for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr.value}"
    return None


def last_name(node: cst.BaseExpression) -> str | None:
    """``c`` for ``a.b.c``, for ``f().c`` and for ``c[int]``."""
    if isinstance(node, cst.Subscript):
        return last_name(node.value)
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else None


def bound_otherwise(node: cst.CSTNode) -> list[str]:
    """The names that a node gives a value without an assignment: loops, ``with``, ``:=``, patterns, lambdas."""
    if isinstance(node, cst.Lambda):
        return [each.name.value for each in (*node.params.params, *node.params.kwonly_params)]
    target: cst.CSTNode | None = None
    if isinstance(node, cst.For | cst.CompFor | cst.NamedExpr):
        target = node.target
    elif isinstance(node, cst.AsName | cst.MatchAs):
        target = node.name
    if isinstance(target, cst.Tuple | cst.List):
        return [name for each in target.elements if (name := dotted(each.value))]
    name = dotted(target) if isinstance(target, cst.BaseExpression) else None
    return [name] if name else []


def keyword(call: cst.Call, name: str) -> cst.BaseExpression | None:
    """The value of a keyword argument."""
    return next((arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == name), None)


def is_dict(node: cst.BaseExpression) -> bool:
    """Whether a node is ``{...}`` or ``dict(...)``."""
    return isinstance(node, cst.Dict) or (isinstance(node, cst.Call) and last_name(node.func) == "dict")
