"""What else a change of the source reaches: the validation's loader often has its workers from the same place.

Needs libcst; imported late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import libcst as cst

from fulltilt.tuning.source_loaders import SETTINGS, LoaderCalls
from fulltilt.tuning.source_tree import SourceTree
from fulltilt.tuning.source_values import Values


class Reach:
    """Asks one module which loaders a change of it changes besides the one that was studied."""

    def __init__(self, tree: SourceTree, values: Values, calls: LoaderCalls) -> None:
        self._tree = tree
        self._values = values
        self._calls = calls

    def remarks(self, call: cst.Call, changed: Collection[cst.CSTNode]) -> Iterator[str]:
        """Sentences for the reader of the diff. ``changed``: literals and dicts, and the call if it gets arguments."""
        others = [other for other in self._tree.calls if other is not call and self._takes(other, changed)]
        loaders = [other for other in others if self._calls.is_loader(other)]
        for what, found in (("loader made", loaders), ("call", [each for each in others if each not in loaders])):
            if found:
                yield f"the change also reaches the {what} in {self._lines(found)}"
        makers = list(self._callers(call, changed))
        if len(makers) > 1:
            name = self._tree.code(makers[0].func)
            yield f"{name}(...) makes a loader in {self._lines(makers)}; the change may reach all of them"
        around = [each for each in self._tree.above(call) if self._tree.home(each) is self._tree.home(call)]
        if any(isinstance(each, cst.BaseComp) for each in around):
            yield f"the call in {self._lines([call])} makes several loaders; the change reaches all of them"
        elif any(isinstance(each, cst.Lambda | cst.For) for each in around):
            yield f"the call in {self._lines([call])} may make several loaders; the change reaches all of them"

    def _takes(self, other: cst.Call, changed: Collection[cst.CSTNode]) -> bool:
        """Whether a call gets one of its settings, or the dict with them, from what is changed."""
        unpacked = [arg.value for arg in other.args if arg.star == "**"]
        if any(_meet(self._values.displays(each) or (), changed) for each in unpacked):
            return True
        if not self._calls.is_loader(other):
            return False
        written = [self._calls.written(other, name) for name in SETTINGS]
        written += [entry.node for each in unpacked for name in SETTINGS for entry in self._values.entries(each, name)]
        return any(_meet((found.node for found in self._values.behind(each)), changed) for each in written if each)

    def _callers(self, call: cst.Call, changed: Collection[cst.CSTNode]) -> Iterator[cst.Call]:
        """The calls of the function around the loader's call that the change reaches."""
        home = self._tree.home(call)
        if not isinstance(home, cst.FunctionDef):
            return
        inside = any(each is home or home in self._tree.above(each) for each in changed)
        name = home.name.value
        # Of methods only those of its own class: model.train() has nothing to do with a train() that makes a loader.
        own = {name} if self._tree.home(home) is None else {f"self.{name}", f"cls.{name}"}
        for other in self._tree.calls:
            if self._tree.code(other.func) in own:
                given = (found.node for arg in other.args if not arg.star for found in self._values.behind(arg.value))
                if inside or _meet(given, changed):
                    yield other

    def _lines(self, calls: Iterable[cst.Call]) -> str:
        lines = list(dict.fromkeys(sorted(map(self._tree.begins, calls))))
        *first, last = map(str, lines)
        return f"lines {', '.join(first)} and {last}" if first else f"line {last}"


def _meet(nodes: Iterable[cst.CSTNode | None], changed: Collection[cst.CSTNode]) -> bool:
    return any(node is each for node in nodes for each in changed)
