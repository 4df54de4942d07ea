"""Where in a source file a value comes from: from a name to what is written for it. Needs libcst; imported late.

A value may be given in several places (an ``if``, a default and its callers). All of them are looked for; one that
cannot be read is an unknown, and then nothing is known.
"""

from __future__ import annotations

import libcst as cst

from fulltilt.tuning.source_bindings import UNKNOWN, Bindings, Written
from fulltilt.tuning.source_tree import MISSING, SourceTree, dotted, is_dict, keyword, last_name, literal

# From a loader's argument over a parameter and an attribute to a default. People do not follow longer chains either.
DEEPEST = 5


class Values:
    """Answers what a name, an attribute or an item of a module may stand for."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree
        self._bindings = Bindings(tree)

    def behind(self, node: cst.BaseExpression, depth: int = 0) -> list[Written]:
        """Every literal or other final expression that may give ``node`` its value."""
        if literal(node) is not MISSING:
            return [Written(node)]
        if depth == DEEPEST:
            return [UNKNOWN]
        found: list[Written] = []
        for source in self._sources(node):
            if source.node is None or literal(source.node) is not MISSING or is_dict(source.node):
                found.append(source)
            else:
                found += [Written(more.node, more.note or source.note) for more in self.behind(source.node, depth + 1)]
        return found or [UNKNOWN]

    def _sources(self, node: cst.BaseExpression) -> list[Written]:
        if isinstance(node, cst.Name):
            return self._of_name(node)
        if isinstance(node, cst.Attribute):
            return self._of_attribute(node)
        if isinstance(node, cst.IfExp):
            return [Written(node.body), Written(node.orelse)]
        if isinstance(node, cst.Subscript) and len(node.slice) == 1:
            index = node.slice[0].slice
            key = literal(index.value) if isinstance(index, cst.Index) else MISSING
            return self.entries(node.value, key) if isinstance(key, str) else [UNKNOWN]
        return [UNKNOWN]

    # ------------------------------------------------------------------ names

    def _of_name(self, node: cst.Name) -> list[Written]:
        """What is assigned to a name in the innermost scope that knows it, and what callers give for a parameter."""
        home = self._tree.home(node)
        while home is not None:
            found = [*self._bindings.assigned(node.value, home)]
            if isinstance(home, cst.FunctionDef):
                found += self._bindings.passed(home, node.value)
            if found:
                return found
            home = self._tree.home(home)
        return [*self._bindings.assigned(node.value, None)]

    # ------------------------------------------------------------------ attributes

    def _of_attribute(self, node: cst.Attribute) -> list[Written]:
        key, base = node.attr.value, dotted(node.value)
        if base is None:
            return [UNKNOWN]
        around = self._tree.class_around(node)
        if base in ("self", "cls", "self.hparams") and around is not None:
            return self._of_class(around, key, hyperparameters=base.endswith("hparams"))
        set_later = self._bindings.set_later(base, key)
        if base in self._tree.classes:
            return [*set_later, *self._of_class(self._tree.classes[base], key)]
        made = [found for source in self._sources(node.value) for found in self._of_made(source.node, key)]
        return [*set_later, *made] or [UNKNOWN]

    def _of_made(self, maker: cst.BaseExpression | None, key: str, depth: int = 0) -> list[Written]:
        """An attribute of what an expression makes: of a class of this file, or of parsed arguments."""
        if isinstance(maker, cst.Name | cst.Attribute) and depth < DEEPEST:
            if isinstance(maker, cst.Name) and maker.value in self._tree.classes:
                return self._of_class(self._tree.classes[maker.value], key)
            made = [found for source in self._sources(maker) for found in self._of_made(source.node, key, depth + 1)]
            return [*self._bindings.set_later(dotted(maker) or "", key), *made]
        if not isinstance(maker, cst.Call) or depth == DEEPEST:
            return [UNKNOWN]
        function = last_name(maker.func)
        if isinstance(maker.func, cst.Name) and (returned := self._tree.returned(maker.func.value)):
            return [found for node in returned for found in self._of_made(node, key, depth + 1)]
        if function in ("parse_args", "parse_known_args"):
            flag = f"--{key}".replace("_", "-")
            if any(flag in self._tree.code(arg.value).replace("_", "-") for arg in maker.args):
                return [UNKNOWN]  # it is given there
            return self._bindings.argparse_defaults(key) or [UNKNOWN]
        given = keyword(maker, key)
        if given is not None:
            return [Written(given)]
        if any(arg.star or arg.keyword is None for arg in maker.args):
            return [UNKNOWN]
        return self._of_class(self._tree.classes[function], key) if function in self._tree.classes else [UNKNOWN]

    def _of_class(self, home: cst.ClassDef, key: str, hyperparameters: bool = False) -> list[Written]:
        """An attribute of a class: as its body has it, as a method sets it, or as one that inherits from it has it."""
        found = []
        family = self._tree.heirs(home)
        for node in self._tree.nodes:
            if isinstance(node, cst.Assign | cst.AnnAssign | cst.AugAssign):
                if self._tree.home(node) in family:
                    found += [_field(written) for written in self._bindings.of_assignment(node, key)]
                elif self._tree.class_around(node) in family:
                    found += self._bindings.of_assignment(node, f"self.{key}")
            elif isinstance(node, cst.Call) and self._tree.class_around(node) in family:
                found += self._bindings.set_by_call(node, "self", key)
            elif (
                hyperparameters
                and isinstance(node, cst.FunctionDef)
                and node.name.value == "__init__"
                and self._tree.home(node) is home
            ):
                found += self._bindings.passed(node, key)
        return found or [UNKNOWN]

    # ------------------------------------------------------------------ dicts

    def displays(self, node: cst.BaseExpression, depth: int = 0) -> list[cst.Dict | cst.Call] | None:
        """The dicts, as written, that together make up what ``node`` stands for, the first first; None if not known."""
        if is_dict(node):
            return [node]  # type: ignore[list-item]
        sources = [UNKNOWN] if isinstance(node, cst.Call) or depth == DEEPEST else self.behind(node)
        if len(sources) != 1 or sources[0].node is None or not is_dict(sources[0].node):
            return None
        found = [sources[0].node]
        name = dotted(node)
        for call in self._tree.calls:
            if name is None or dotted(call.func) != f"{name}.update":
                continue
            for arg in call.args:
                if arg.keyword is not None:
                    found.append(call)
                    break
                more = self.displays(arg.value, depth + 1)
                if more is None:
                    return None
                found += more
        return found  # type: ignore[return-value]

    def entries(self, node: cst.BaseExpression, key: str, depth: int = 0) -> list[Written]:
        """What stands for a key in the dict that ``node`` stands for, in all its parts; none if it is not written."""
        displays = self.displays(node) if depth < DEEPEST else None
        if displays is None:
            return [UNKNOWN]
        found = [written for display in displays for written in self.in_display(display, key, depth)]
        name = dotted(node)
        for each in self._tree.nodes:
            if name is not None and isinstance(each, cst.Assign):
                for target in each.targets:
                    if _item(target.target) == (name, key):
                        found.append(Written(each.value))
        return found

    def in_display(self, display: cst.Dict | cst.Call, key: str, depth: int = 0) -> list[Written]:
        """What stands for a key in one of ``displays``: a dict as written, or a call that updates it."""
        if isinstance(display, cst.Call):
            given = keyword(display, key)
            others = [arg.value for arg in display.args if arg.keyword is None]
            if given is not None:
                return [Written(given)]
            return [written for more in others for written in self.entries(more, key, depth + 1)]
        found = []
        for element in display.elements:
            if isinstance(element, cst.StarredDictElement):
                found += self.entries(element.value, key, depth + 1)
            elif isinstance(element, cst.DictElement) and literal(element.key) == key:
                found = [Written(element.value)]  # what stands behind wins
        return found


def _field(written: Written) -> Written:
    """``field(default=4)`` of a dataclass gives its default, ``field(default_factory=Part)`` the class of a part."""
    if isinstance(written.node, cst.Call) and last_name(written.node.func) in ("field", "Field"):
        default = keyword(written.node, "default") or keyword(written.node, "default_factory")
        return UNKNOWN if default is None else Written(default, written.note)
    return written


def _item(node: cst.BaseExpression) -> tuple[str | None, object]:
    """``("cfg", "workers")`` for ``cfg["workers"]``."""
    if isinstance(node, cst.Subscript) and len(node.slice) == 1 and isinstance(node.slice[0].slice, cst.Index):
        return dotted(node.value), literal(node.slice[0].slice.value)
    return None, MISSING
