"""Where names of a module get their values: assignments, loops, callers, flags. Needs libcst; imported late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from fulltilt.tuning.source_tree import SourceTree, bound_otherwise, dotted, keyword, last_name, literal


class Written(NamedTuple):
    """An expression that gives the value, None where it is given in a way that is not followed; a note for the diff."""

    node: cst.BaseExpression | None
    note: str = ""


UNKNOWN = Written(None)


# Decorators that hand on what the caller gives, and nothing else.
_LEAVE_ARGUMENTS = frozenset(
    {"staticmethod", "classmethod", "cache", "lru_cache", "no_grad", "inference_mode", "record", "contextmanager"}
)


class Bindings:
    """The values that a module gives to a name, each as it is written, not followed further."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree

    def assigned(self, target: str, home: cst.CSTNode | None) -> Iterator[Written]:
        """Values given to ``target`` (dotted) in a scope, or by a function that declares it global."""
        for node in self._tree.nodes:
            if isinstance(node, cst.Global) and home is None:
                function = self._tree.home(node)
                if function is not None and target in [each.name.value for each in node.names]:
                    yield from self.assigned(target, function)
            elif self._tree.home(node) is not home:
                continue
            elif isinstance(node, cst.Assign | cst.AnnAssign | cst.AugAssign):
                yield from self.of_assignment(node, target)
            elif target in bound_otherwise(node):
                yield UNKNOWN

    def of_assignment(self, node: cst.Assign | cst.AnnAssign | cst.AugAssign, target: str) -> Iterator[Written]:
        """The value that one assignment gives to ``target`` (dotted), if it does."""
        targets = [each.target for each in node.targets] if isinstance(node, cst.Assign) else [node.target]
        for each in targets:
            if dotted(each) == target:
                yield UNKNOWN if node.value is None or isinstance(node, cst.AugAssign) else Written(node.value)
            elif isinstance(each, cst.Tuple | cst.List):
                names = [dotted(element.value) for element in each.elements]
                if target in names:
                    values = node.value.elements if isinstance(node.value, cst.Tuple | cst.List) else ()
                    yield Written(values[names.index(target)].value) if len(values) == len(names) else UNKNOWN

    def passed(self, function: cst.FunctionDef, name: str) -> list[Written]:
        """Values that callers give to a parameter, and its default where one leaves it out."""
        parameters = [*function.params.posonly_params, *function.params.params, *function.params.kwonly_params]
        names = [parameter.name.value for parameter in parameters]
        if name not in names:
            return []
        index = names.index(name)
        owner = self._tree.home(function)
        called = owner.name.value if isinstance(owner, cst.ClassDef) and function.name.value == "__init__" else None
        bound = isinstance(owner, cst.ClassDef) and names[0] in ("self", "cls")
        found: list[Written] = []
        defaulted = False
        for call in self._tree.calls:
            if last_name(call.func) != (called or function.name.value):
                continue
            given = keyword(call, name)
            plain = [arg for arg in call.args if arg.keyword is None and not arg.star]
            place = index - bound
            if given is None and 0 <= place < len(plain):
                given = plain[place].value
            if given is not None:
                found.append(Written(given))
            elif any(arg.star for arg in call.args):
                found.append(UNKNOWN)
            else:
                defaulted = True
        default = parameters[index].default
        if not all(map(_leaves_arguments, function.decorators)):
            found.append(UNKNOWN)  # as click's options do
        if defaulted and default is not None:
            shown = called or function.name.value
            found.append(Written(default, f"the default of {shown}({name}=…) holds for all its callers"))
        return found or [UNKNOWN]

    def set_later(self, base: str, key: str) -> list[Written]:
        """What is assigned to ``base.key`` anywhere."""
        assignments = (
            each for each in self._tree.nodes if isinstance(each, cst.Assign | cst.AnnAssign | cst.AugAssign)
        )
        found = [written for each in assignments for written in self.of_assignment(each, f"{base}.{key}")]
        return [*found, *(written for call in self._tree.calls for written in self.set_by_call(call, base, key))]

    def set_by_call(self, call: cst.Call, base: str, key: str) -> Iterator[Written]:
        """What ``setattr(base, "key", …)`` gives; unknown for any name, as from a file with other settings."""
        if self._tree.code(call.func) in (f"vars({base}).update", f"{base}.__dict__.update", f"{base}.update"):
            yield UNKNOWN
        elif dotted(call.func) == "setattr" and len(call.args) == 3 and dotted(call.args[0].value) == base:
            name = literal(call.args[1].value)
            if name == key:
                yield Written(call.args[2].value)
            elif not isinstance(name, str):
                yield UNKNOWN

    def argparse_defaults(self, key: str) -> list[Written]:
        """The default in ``add_argument("--num-workers", default=4)``, and those that ``set_defaults`` puts over it."""
        found = []
        for call in self._tree.calls:
            if last_name(call.func) == "set_defaults":
                given = keyword(call, key)
                found += [UNKNOWN] * any(arg.star for arg in call.args) + ([] if given is None else [Written(given)])
            if last_name(call.func) != "add_argument":
                continue
            named = [literal(arg.value) for arg in call.args if arg.keyword is None]
            flags = [str(flag).lstrip("-").replace("-", "_") for flag in named if str(flag).startswith("--")]
            destination = keyword(call, "dest")
            name = literal(destination) if destination is not None else next(iter(flags or named), None)
            if name == key:
                default = keyword(call, "default")
                note = "the flag's default changes; a value given on the command line still wins"
                found.append(UNKNOWN if default is None else Written(default, note))
        return found


def _leaves_arguments(decorator: cst.Decorator) -> bool:
    node = decorator.decorator
    return last_name(node.func if isinstance(node, cst.Call) else node) in _LEAVE_ARGUMENTS
