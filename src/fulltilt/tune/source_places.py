"""Where in a source file a loader's argument gets its value. Needs libcst; imported late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from fulltilt.tune.source_call import POSITIONS
from fulltilt.tune.source_layout import Replacing, appended, with_arguments

_MISSING = object()


class Unclear(Exception):  # noqa: N818 - reads as the sentence it is
    """An argument's value is not one literal that could be changed; the message says what to write instead."""


class Place:
    """A literal in the source."""

    def __init__(self, node: cst.BaseExpression, remarks: tuple[str, ...] = ()) -> None:
        self.node = node
        self.remarks = remarks

    def replacement(self, code: str) -> cst.BaseExpression:
        """What stands there afterwards."""
        return cst.parse_expression(code)


class DictPlace:
    """A dict display or a dict(...) call that is unpacked into the loader's call."""

    def __init__(self, node: cst.Dict | cst.Call, remarks: tuple[str, ...]) -> None:
        self.node = node
        self.remarks = remarks

    def with_entries(self, entries: Mapping[str, str], replacements: Mapping[cst.CSTNode, cst.CSTNode]) -> cst.CSTNode:
        """The dict with more entries, written as its last one is."""
        node: Any = self.node.visit(Replacing(replacements))
        if isinstance(node, cst.Call):
            return with_arguments(node, entries)
        quote = _quote_of(node)
        new = [
            cst.DictElement(cst.SimpleString(f"{quote}{key}{quote}"), cst.parse_expression(code))
            for key, code in entries.items()
        ]
        changed: cst.Dict = node.with_changes(elements=appended(node.elements, new))
        return changed


class Places:
    """One module, with the questions that a change of a loader's arguments asks of it."""

    def __init__(self, module: cst.Module) -> None:
        self._wrapper = MetadataWrapper(module)
        self._module = self._wrapper.module
        self._positions = self._wrapper.resolve(PositionProvider)
        self._parents = self._wrapper.resolve(ParentNodeProvider)
        self._nodes = list(self._positions)

    # ------------------------------------------------------------------ the call

    def loader_call(self, line: int) -> cst.Call | None:
        """The call at a line: of DataLoader where one is, otherwise of a class of the user's own that begins there."""
        around = [n for n in self._nodes if isinstance(n, cst.Call) and self._begins(n) <= line <= self._ends(n)]
        named = [call for call in around if (_dotted(call.func) or "").split(".")[-1] == "DataLoader"]
        other = [call for call in around if self._begins(call) == line and (_last_name(call.func) or "a")[0].isupper()]
        found = named or other
        return max(found, key=lambda call: (self._begins(call), -self._ends(call)), default=None)

    def of_argument(self, call: cst.Call, name: str, value: object) -> Place | None:
        """The literal that gives an argument its value; None when the argument is not written. Raises Unclear."""
        written = self._written(call, name)
        if written is not None:
            return self._origin(written, name, value)
        for unpacked in (arg for arg in call.args if arg.star == "**"):
            entry = self._entry(unpacked.value, name)
            if entry is not None:
                return self._origin(entry, name, value, self._shared(unpacked.value, call))
        return None

    def variable_workers(self, call: cst.Call) -> str | None:
        """The code of the call's number of workers where it may differ from one time to the next; None where not."""
        written = self._written(call, "num_workers")
        if written is None or _literal(written) is not _MISSING:
            return None
        simple = isinstance(written, cst.Name | cst.Attribute | cst.Subscript | cst.Call)
        return self._code(written) if simple else f"({self._code(written)})"

    def unpacks(self, call: cst.Call) -> bool:
        """Whether a dict is unpacked into the call: a new argument might stand in it twice."""
        return any(arg.star == "**" for arg in call.args)

    def unpacked_dict(self, call: cst.Call) -> DictPlace | str:
        """The dict that is unpacked into the call, or why it cannot be changed."""
        for unpacked in (arg.value for arg in call.args if arg.star == "**"):
            display = self._display(unpacked)
            if display is not None:
                return DictPlace(display, self._shared(unpacked, call))
        return f"the arguments come from **{self._code(call.args[-1].value)}, which is not a dict written in this file"

    def with_keywords(
        self, call: cst.Call, added: Mapping[str, str], replacements: Mapping[cst.CSTNode, cst.CSTNode]
    ) -> cst.CSTNode:
        """The call with more keyword arguments, written as its last one is."""
        node: Any = call.visit(Replacing(replacements))
        return with_arguments(node, added)

    def replaced(self, replacements: Mapping[cst.CSTNode, cst.CSTNode]) -> str:
        """The source with these nodes exchanged."""
        return self._module.visit(Replacing(replacements)).code

    def _written(self, call: cst.Call, name: str) -> cst.BaseExpression | None:
        plain = [arg for arg in call.args if not arg.star]
        for index, arg in enumerate(plain):
            if arg.keyword is not None:
                if arg.keyword.value == name:
                    return arg.value
            elif index < len(POSITIONS) and POSITIONS[index] == name:
                return arg.value
        return None

    # ------------------------------------------------------------------ where a value comes from

    def _origin(self, node: cst.BaseExpression, name: str, value: object, remarks: tuple[str, ...] = ()) -> Place:
        if _literal(node) is not _MISSING:
            return Place(node, remarks)
        candidates = [
            (literal, note)
            for literal, note in self._candidates(node)
            if _literal(literal) is not _MISSING and _literal(literal) == value
        ]
        if len(candidates) == 1:
            literal, note = candidates[0]
            return Place(literal, (*remarks, note) if note else remarks)
        raise Unclear(f"{name} is {self._code(node)} there, whose value is not one literal in this file")

    def _candidates(self, node: cst.BaseExpression) -> list[tuple[cst.BaseExpression, str]]:
        """Literals that may be the value of a name, an attribute or an item."""
        if isinstance(node, cst.Name):
            return [*self._assigned(node.value), *self._passed(node)]
        if isinstance(node, cst.Attribute):
            key = node.attr.value
            return [*self._assigned(key, in_class=True), *self._keywords(key), *self._argparse_defaults(key)]
        if isinstance(node, cst.Subscript) and len(node.slice) == 1:
            index = node.slice[0].slice
            if isinstance(index, cst.Index) and isinstance(index.value, cst.SimpleString):
                entry = self._entry(node.value, str(index.value.evaluated_value))
                return [] if entry is None else [(entry, "")]
        return []

    def _assigned(self, name: str, in_class: bool = False) -> list[tuple[cst.BaseExpression, str]]:
        """Values given to a name: ``name = 4``, and in a class ``name: int = 4``."""
        found = []
        for node in self._nodes:
            if isinstance(node, cst.AnnAssign):
                targets, value = [node.target], node.value
            elif isinstance(node, cst.Assign):
                targets, value = [target.target for target in node.targets], node.value
            else:
                continue
            if in_class and not isinstance(self._home(node), cst.ClassDef):
                targets = [t for t in targets if isinstance(t, cst.Attribute)]
            names = [_last_name(target) for target in targets if isinstance(target, cst.Name | cst.Attribute)]
            if value is not None and name in names:
                found.append((value, ""))
        return found

    def _passed(self, node: cst.Name) -> list[tuple[cst.BaseExpression, str]]:
        """Values that callers give to a parameter of the function around it, or its default."""
        function = self._home(node)
        if not isinstance(function, cst.FunctionDef):
            return []
        parameters = [*function.params.params, *function.params.kwonly_params]
        names = [parameter.name.value for parameter in parameters]
        if node.value not in names:
            return []
        index = names.index(node.value)
        found: list[tuple[cst.BaseExpression, str]] = []
        defaulted = False
        for call in self._nodes:
            if isinstance(call, cst.Call) and _last_name(call.func) == function.name.value:
                given = [a.value for a in call.args if a.keyword is not None and a.keyword.value == node.value]
                if not given and index < len(call.args) and call.args[index].keyword is None:
                    given = [call.args[index].value]
                found += [(value, "") for value in given]
                defaulted = defaulted or not given
        default = parameters[index].default
        if defaulted and default is not None:
            found.append((default, f"the default of {function.name.value}({node.value}=…) holds for all its callers"))
        return found

    def _keywords(self, key: str) -> list[tuple[cst.BaseExpression, str]]:
        """Values in calls such as ``Config(num_workers=4)`` of a class of the user's own."""
        return [
            (arg.value, "")
            for call in self._nodes
            if isinstance(call, cst.Call) and (_last_name(call.func) or "a")[0].isupper()
            for arg in call.args
            if arg.keyword is not None and arg.keyword.value == key and _last_name(call.func) != "DataLoader"
        ]

    def _argparse_defaults(self, key: str) -> list[tuple[cst.BaseExpression, str]]:
        """The default in ``add_argument("--num-workers", default=4)``."""
        found = []
        for call in self._nodes:
            if not isinstance(call, cst.Call) or _last_name(call.func) != "add_argument":
                continue
            flags = [a.value.evaluated_value for a in call.args if isinstance(a.value, cst.SimpleString)]
            if any(str(flag).lstrip("-").replace("-", "_") == key for flag in flags):
                found += [
                    (arg.value, "the flag's default changes; a value given on the command line still wins")
                    for arg in call.args
                    if arg.keyword is not None and arg.keyword.value == "default"
                ]
        return found

    # ------------------------------------------------------------------ dicts

    def _display(self, node: cst.BaseExpression) -> cst.Dict | cst.Call | None:
        """The one dict display or dict(...) call that a name stands for."""
        found = [node] if not isinstance(node, cst.Name) else [value for value, _ in self._assigned(node.value)]
        dicts = [
            d for d in found if isinstance(d, cst.Dict) or (isinstance(d, cst.Call) and _last_name(d.func) == "dict")
        ]
        return dicts[0] if len(dicts) == 1 and len(found) == 1 else None

    def _entry(self, node: cst.BaseExpression, key: str) -> cst.BaseExpression | None:
        display = self._display(node)
        if isinstance(display, cst.Dict):
            for element in display.elements:
                if isinstance(element, cst.DictElement) and _literal(element.key) == key:
                    return element.value
        elif display is not None:
            for arg in display.args:
                if arg.keyword is not None and arg.keyword.value == key:
                    return arg.value
        return None

    def _shared(self, node: cst.BaseExpression, call: cst.Call) -> tuple[str, ...]:
        """A remark when the dict is unpacked into other calls as well."""
        if not isinstance(node, cst.Name):
            return ()
        others = [
            self._begins(other)
            for other in self._nodes
            if isinstance(other, cst.Call)
            and other is not call
            and any(
                a.star == "**" and isinstance(a.value, cst.Name) and a.value.value == node.value for a in other.args
            )
        ]
        if not others:
            return ()
        return (f"{node.value} also goes into the call in line {', '.join(map(str, sorted(others)))}",)

    # ------------------------------------------------------------------ around a node

    def _home(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The function or class that a node stands in."""
        parent = self._parents.get(node)
        while parent is not None and not isinstance(parent, cst.FunctionDef | cst.ClassDef):
            parent = self._parents.get(parent)
        return parent

    def _begins(self, node: cst.CSTNode) -> int:
        return int(self._positions[node].start.line)

    def _ends(self, node: cst.CSTNode) -> int:
        return int(self._positions[node].end.line)

    def _code(self, node: cst.CSTNode) -> str:
        return self._module.code_for_node(node)


def _literal(node: cst.BaseExpression) -> object:
    if isinstance(node, cst.Integer | cst.SimpleString):
        return node.evaluated_value
    if isinstance(node, cst.Name) and node.value in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[node.value]
    return _MISSING


def _quote_of(node: cst.Dict) -> str:
    keys = [e.key for e in node.elements if isinstance(e, cst.DictElement) and isinstance(e.key, cst.SimpleString)]
    return keys[0].quote if keys else '"'


def _dotted(node: cst.BaseExpression) -> str | None:
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    return None


def _last_name(node: cst.BaseExpression) -> str | None:
    return (_dotted(node) or "").split(".")[-1] or None
