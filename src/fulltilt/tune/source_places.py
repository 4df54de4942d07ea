"""Where in a source file a loader's arguments are written, and where new ones go. Needs libcst; imported late."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import libcst as cst

from fulltilt.tune.source_layout import Replacing, appended, with_arguments
from fulltilt.tune.source_tree import MISSING, SourceTree, is_dict, last_name, literal
from fulltilt.tune.source_values import Values, Written

# The order of DataLoader's positional arguments.
POSITIONS = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context"),
)


class Unclear(Exception):  # noqa: N818 - reads as the sentence it is
    """Why a call or an argument's value cannot be changed."""


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
        self._tree = SourceTree(module)
        self._values = Values(self._tree)
        self._loaders = {"DataLoader"} | {
            alias.asname.name.value
            for node in self._tree.nodes
            if isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar)
            for alias in node.names
            if alias.asname is not None and isinstance(alias.asname.name, cst.Name) and alias.name.value == "DataLoader"
        }

    # ------------------------------------------------------------------ the call

    def loader_call(self, line: int, given: Collection[str] = ()) -> cst.Call:
        """The call that makes the loader at a line: of DataLoader, or of a class of this file. Raises Unclear.

        ``given`` are the arguments that it was seen with; they tell several calls of one line apart.
        """
        begins, ends = self._tree.begins, self._tree.ends
        around = [call for call in self._tree.calls if begins(call) <= line <= ends(call)]
        named = [
            call for call in around if (last_name(call.func) or "").endswith("DataLoader") or self._is_torchs(call)
        ]
        own = [call for call in around if begins(call) == line and last_name(call.func) in self._tree.classes]
        found = named or own
        if not found:
            raise Unclear(f"no DataLoader(...) call stands at line {line}")
        nearest = max(begins(call) for call in found)
        found = [call for call in found if begins(call) == nearest]
        if len(found) > 1:
            found = [call for call in found if self._names(call) == set(given)]
        if len(found) != 1:
            raise Unclear(f"several loaders are made at line {line}")
        return found[0]

    def of_argument(self, call: cst.Call, name: str, value: object) -> Place | None:
        """The literal that gives an argument its value; None when the argument is not written. Raises Unclear."""
        written = self._written(call, name)
        if written is not None and literal(written) is not MISSING:
            return Place(written)
        if written is not None:
            return self._literal_behind(written, name, self._values.behind(written), value)
        for unpacked in (arg.value for arg in call.args if arg.star == "**"):
            entries = self._values.entries(unpacked, name)
            if entries == [Written(None)]:
                raise Unclear(self._not_a_dict(unpacked))
            if entries:
                behind = [
                    more for entry in entries if entry.node is not None for more in self._values.behind(entry.node)
                ]
                place = self._literal_behind(unpacked, name, behind, value)
                return Place(place.node, (*self._shared(unpacked, call), *place.remarks))
        if not self._takes(call, name):
            raise Unclear(f"{self._tree.code(call.func)}(...) does not take {name}: its constructor sets it")
        return None

    def variable_workers(self, call: cst.Call) -> str | None:
        """The code of the call's number of workers where it may differ from one time to the next; None where not."""
        written = self._written(call, "num_workers")
        if written is None or literal(written) is not MISSING:
            return None
        simple = isinstance(written, cst.Name | cst.Attribute | cst.Subscript | cst.Call)
        return self._tree.code(written) if simple else f"({self._tree.code(written)})"

    def unpacks(self, call: cst.Call) -> bool:
        """Whether a dict is unpacked into the call: a new argument might stand in it twice."""
        return any(arg.star == "**" for arg in call.args)

    def unpacked_dict(self, call: cst.Call) -> DictPlace:
        """The dict that is unpacked into the call; of several parts the one with the workers. Raises Unclear."""
        unpacked = [arg.value for arg in call.args if arg.star == "**"]
        for each in unpacked:
            displays = [display for display in self._values.displays(each) or () if is_dict(display)]
            if displays:
                with_workers = (display for display in displays if self._values.entries(display, "num_workers"))
                return DictPlace(next(with_workers, displays[0]), self._shared(each, call))
        raise Unclear(self._not_a_dict(unpacked[-1]))

    def with_keywords(
        self, call: cst.Call, added: Mapping[str, str], replacements: Mapping[cst.CSTNode, cst.CSTNode]
    ) -> cst.CSTNode:
        """The call with more keyword arguments, written as its last one is."""
        node: Any = call.visit(Replacing(replacements))
        return with_arguments(node, added)

    def replaced(self, replacements: Mapping[cst.CSTNode, cst.CSTNode]) -> str:
        """The source with these nodes exchanged."""
        return self._tree.replaced(replacements)

    # ------------------------------------------------------------------ what a call takes

    def _is_torchs(self, call: cst.Call) -> bool:
        return last_name(call.func) in self._loaders

    def _constructor(self, call: cst.Call) -> cst.FunctionDef | None:
        """The constructor of a class of this file; None where the class inherits DataLoader's, or is DataLoader."""
        home = None if self._is_torchs(call) else self._tree.classes.get(last_name(call.func) or "")
        return next(
            (
                node
                for node in self._tree.nodes
                if home is not None
                and isinstance(node, cst.FunctionDef)
                and node.name.value == "__init__"
                and self._tree.home(node) is home
            ),
            None,
        )

    def _takes(self, call: cst.Call, name: str) -> bool:
        constructor = self._constructor(call)
        if constructor is None or isinstance(constructor.params.star_kwarg, cst.Param):
            return True
        return name in _parameters(constructor)

    def _written(self, call: cst.Call, name: str) -> cst.BaseExpression | None:
        constructor = self._constructor(call)
        positions = POSITIONS if constructor is None else _parameters(constructor)
        plain = [arg for arg in call.args if not arg.star]
        for index, arg in enumerate(plain):
            if arg.keyword is not None:
                if arg.keyword.value == name:
                    return arg.value
            elif index < len(positions) and positions[index] == name:
                return arg.value
        return None

    def _names(self, call: cst.Call) -> set[str]:
        """The arguments that are written in a call."""
        names = [arg.keyword.value if arg.keyword is not None else None for arg in call.args if not arg.star]
        return {name or POSITIONS[index] for index, name in enumerate(names) if name or index < len(POSITIONS)}

    # ------------------------------------------------------------------ what is behind an argument

    def _literal_behind(self, node: cst.BaseExpression, name: str, behind: list[Written], value: object) -> Place:
        same = [each for each in behind if each.node is not None and literal(each.node) == value]
        if len(same) == 1 and all(each.node is not None for each in behind):
            (found,) = same
            assert found.node is not None
            return Place(found.node, (found.note,) if found.note else ())
        raise Unclear(f"{name} is {self._tree.code(node)} there, whose value is not one literal in this file")

    def _not_a_dict(self, node: cst.BaseExpression) -> str:
        return f"the arguments come from **{self._tree.code(node)}, which is not a dict written in this file"

    def _shared(self, node: cst.BaseExpression, call: cst.Call) -> tuple[str, ...]:
        """A remark when the dict is unpacked into other calls as well."""
        if not isinstance(node, cst.Name):
            return ()
        others = [
            self._tree.begins(other)
            for other in self._tree.calls
            if other is not call
            and any(
                a.star == "**" and isinstance(a.value, cst.Name) and a.value.value == node.value for a in other.args
            )
        ]
        if not others:
            return ()
        return (f"{node.value} also goes into the call in line {', '.join(map(str, sorted(others)))}",)


def _parameters(function: cst.FunctionDef) -> list[str]:
    """The names of a method's parameters without self."""
    parameters = [*function.params.posonly_params, *function.params.params, *function.params.kwonly_params]
    return [parameter.name.value for parameter in parameters][1:]


def _quote_of(node: cst.Dict) -> str:
    keys = [e.key for e in node.elements if isinstance(e, cst.DictElement) and isinstance(e.key, cst.SimpleString)]
    return keys[0].quote if keys else '"'
