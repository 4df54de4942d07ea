"""Where in a source file a loader's arguments are written, and where new ones go. Needs libcst; imported late."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import libcst as cst

from fulltilt.tuning.source_bindings import Written
from fulltilt.tuning.source_layout import Replacing, appended, with_arguments
from fulltilt.tuning.source_loaders import LoaderCalls, Unclear
from fulltilt.tuning.source_reach import Reach
from fulltilt.tuning.source_tree import MISSING, SourceTree, last_name, literal
from fulltilt.tuning.source_uses import Uses
from fulltilt.tuning.source_values import Values


class Place:
    """A literal in the source. ``guarded``: it only counts where there are workers, as in ``2 if n > 0 else None``."""

    def __init__(self, node: cst.BaseExpression, remarks: tuple[str, ...] = (), guarded: bool = False) -> None:
        self.node = node
        self.remarks = remarks
        self.guarded = guarded

    @property
    def is_none(self) -> bool:
        """Whether it leaves the choice to torch."""
        return literal(self.node) is None

    def replacement(self, code: str) -> cst.BaseExpression:
        """What stands there afterwards."""
        return cst.parse_expression(code)


class DictPlace:
    """A dict display or a dict(...) call that is unpacked into the loader's call."""

    def __init__(self, node: cst.Dict | cst.Call) -> None:
        self.node = node

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
    """One module, with the questions that a change of a loader's arguments asks of it.

    ``given`` are the arguments that the loader was seen with, empty where that is not known.
    """

    def __init__(self, module: cst.Module, given: Collection[str] = ()) -> None:
        self._tree = SourceTree(module)
        self._values = Values(self._tree)
        self._given = frozenset(given)
        self._calls = LoaderCalls(self._tree, self._given)

    def loader_call(self, line: int) -> cst.Call:
        """The call that makes the loader at a line. Raises Unclear."""
        return self._calls.at(line)

    def of_argument(self, call: cst.Call, name: str, value: object) -> Place | None:
        """The literal that gives an argument its value; None when the argument is not written. Raises Unclear."""
        written = self._calls.written(call, name)
        if written is not None and literal(written) is not MISSING:
            return Place(written)
        is_literal = isinstance(written, cst.IfExp) and literal(written.body) is not MISSING
        if isinstance(written, cst.IfExp) and is_literal and self._tests_workers(call, written.test):
            return Place(written.body, guarded=True)
        if written is not None:
            return self._literal_behind(written, name, [Written(written)], value)
        for unpacked in (arg.value for arg in call.args if arg.star == "**"):
            entries = self._values.entries(unpacked, name)
            if entries == [Written(None)]:
                raise Unclear(self._not_a_dict(unpacked))
            if entries and self._given and name not in self._given:
                raise Unclear(f"{name} is taken out of **{self._tree.code(unpacked)} before it comes there")
            if entries:
                return self._literal_behind(unpacked, name, entries, value)
        if (why := self._calls.why_not(call, name)) is not None:
            raise Unclear(why)
        return None

    def variable_workers(self, call: cst.Call, replacements: Mapping[cst.CSTNode, cst.CSTNode]) -> str | None:
        """The code of the call's number of workers, as it will be, where it may differ from one time to the next."""
        written = self._calls.written(call, "num_workers")
        if written is None or literal(written) is not MISSING:
            return None
        changed: Any = written.visit(Replacing(replacements))
        code = self._tree.code(changed)
        simple = isinstance(written, cst.Name | cst.Attribute | cst.Subscript | cst.Call) or changed.lpar
        return code if simple else f"({code})"

    def guarded(self, call: cst.Call, name: str, workers: str, is_flag: bool) -> dict[cst.CSTNode, cst.CSTNode]:
        """The argument in the call as one that is good without workers too, for a value that stands elsewhere.

        ``n > 0`` would mean nothing there. Nothing where the argument is not written in the call itself.
        """
        written = self._calls.written(call, name)
        if written is None or call not in self._tree.above(written):
            return {}
        code = self._tree.code(written)
        simple = isinstance(written, cst.Name | cst.Attribute | cst.Subscript) or written.lpar
        code = code if simple else f"({code})"
        good = f"{code} and {workers} > 0" if is_flag else f"{code} if {workers} > 0 else None"
        return {written: cst.parse_expression(good)}

    def stands_in(self, call: cst.Call, place: Place) -> bool:
        """Whether a literal is written in the call itself."""
        return call in self._tree.above(place.node)

    def comes_with_workers(self, call: cst.Call, name: str) -> bool:
        """Whether an argument is written as a question whether there are workers: ``persistent_workers=n > 0``."""
        written = self._calls.written(call, name)
        return written is not None and self._tests_workers(call, written)

    def _tests_workers(self, call: cst.Call, test: cst.BaseExpression) -> bool:
        workers = self.variable_workers(call, {})
        if workers is None:
            return False
        bare = test.with_changes(lpar=[], rpar=[])
        forms = ("{}", "{} > 0", "{} >= 1", "{} != 0", "bool({})")
        return self._tree.code(bare) in [form.format(workers) for form in forms]

    def dict_with_workers(self, call: cst.Call, replaced: Collection[cst.CSTNode]) -> DictPlace | None:
        """The dict with the workers that is unpacked into the call; None where they stand elsewhere. Raises Unclear.

        What needs workers is written beside them: a part that is only added with a GPU may be all that has them. Of
        several, beside those that were seen in force and are ``replaced``.
        """
        for each in (arg.value for arg in call.args if arg.star == "**"):
            displays = self._values.displays(each) or []
            with_workers = [display for display in displays if self._values.in_display(display, "num_workers")]
            if len(self._values.entries(each, "num_workers")) > 1:
                with_workers = [display for display in with_workers if self._holds(display, replaced)]
                if not with_workers:
                    raise Unclear(f"num_workers stands in several places of **{self._tree.code(each)}")
            if with_workers and not self._copied(each):
                return DictPlace(with_workers[0])
            if with_workers and len(displays) > 1:
                raise Unclear(f"{self._tree.code(each)} also goes into a dict that may have no workers")
        return None

    def _holds(self, display: cst.Dict | cst.Call, replaced: Collection[cst.CSTNode]) -> bool:
        return any(written.node in replaced for written in self._values.in_display(display, "num_workers"))

    def with_keywords(
        self, call: cst.Call, added: Mapping[str, str], replacements: Mapping[cst.CSTNode, cst.CSTNode]
    ) -> cst.CSTNode:
        """The call with more keyword arguments, written as its last one is."""
        node: Any = call.visit(Replacing(replacements))
        return with_arguments(node, added)

    def reach(self, call: cst.Call, changed: Collection[cst.CSTNode]) -> tuple[str, ...]:
        """What else a change of these nodes reaches, for the reader of the diff."""
        return tuple(Reach(self._tree, self._values, self._calls).remarks(call, changed))

    def replaced(self, replacements: Mapping[cst.CSTNode, cst.CSTNode]) -> str:
        """The source with these nodes exchanged."""
        return self._tree.replaced(replacements)

    # ------------------------------------------------------------------ what is behind an argument

    def _literal_behind(self, shown: cst.BaseExpression, name: str, expressions: list[Written], value: object) -> Place:
        """The one literal with this value behind the expressions that give an argument its value."""
        known = [each.node for each in expressions if each.node is not None]
        behind = _once(written for node in known for written in self._values.behind(node))
        same = [each for each in behind if each.node is not None and literal(each.node) == value]
        if len(same) != 1 or any(each.node is None for each in behind):
            raise Unclear(f"{name} is {self._tree.code(shown)} there, whose value is not one literal in this file")
        (found,) = same
        assert found.node is not None
        uses = Uses(self._tree, self._calls.is_loader)
        for node in known:
            if (line := uses.otherwise(name, node, found.node)) is not None:
                raise Unclear(f"{name} is {self._tree.code(node)}, with which line {line} computes something else")
        return Place(found.node, (found.note,) if found.note else ())

    def _not_a_dict(self, node: cst.BaseExpression) -> str:
        return f"the arguments come from **{self._tree.code(node)}, which is not a dict written in this file"

    def _copied(self, node: cst.BaseExpression) -> bool:
        """Whether a dict also goes into another one, which may have no workers: ``{**kw, "num_workers": 0}``."""
        copied: list[cst.BaseExpression] = []
        for each in self._tree.nodes:
            if isinstance(each, cst.StarredDictElement):
                copied.append(each.value)
            elif isinstance(each, cst.BinaryOperation) and isinstance(each.operator, cst.BitOr):
                copied += [each.left, each.right]
            elif isinstance(each, cst.Call) and last_name(each.func) in ("dict", "copy", "deepcopy"):
                copied += [arg.value for arg in each.args]
                copied += [each.func.value] if isinstance(each.func, cst.Attribute) else []
        return self._tree.code(node) in map(self._tree.code, copied)


def _once(found: Iterable[Written]) -> list[Written]:
    """Several callers may give the same constant."""
    return list({id(each.node): each for each in found}.values())


def _quote_of(node: cst.Dict) -> str:
    keys = [e.key for e in node.elements if isinstance(e, cst.DictElement) and isinstance(e.key, cst.SimpleString)]
    return keys[0].quote if keys else '"'
