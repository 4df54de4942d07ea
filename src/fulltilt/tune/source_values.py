"""Where in a source file a value comes from: from a name to what is written for it. Needs libcst; imported late.

A value may be given in several places (an ``if``, a default and its callers). All of them are looked for; one that
cannot be read is an unknown, and then nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from fulltilt.tune.source_tree import MISSING, SourceTree, dotted, is_dict, keyword, last_name, literal

# From a loader's argument over a parameter and an attribute to a default. People do not follow longer chains either.
DEEPEST = 5


class Written(NamedTuple):
    """An expression that gives the value, None where it is given in a way that is not followed; a note for the diff."""

    node: cst.BaseExpression | None
    note: str = ""


UNKNOWN = Written(None)


class Values:
    """Answers what a name, an attribute or an item of a module may stand for."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree

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

    def behind_entry(self, entry: Written) -> list[Written]:
        """The same for an entry of a dict."""
        return [UNKNOWN] if entry.node is None else self.behind(entry.node)

    def _sources(self, node: cst.BaseExpression) -> list[Written]:
        if isinstance(node, cst.Name):
            return self._of_name(node)
        if isinstance(node, cst.Attribute):
            return self._of_attribute(node)
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
            found = [*self._assigned(node.value, home)]
            if isinstance(home, cst.FunctionDef):
                found += self._passed(home, node.value)
            if found:
                return found
            home = self._tree.home(home)
        return [*self._assigned(node.value, None)]

    def _assigned(self, target: str, home: cst.CSTNode | None) -> Iterator[Written]:
        """Values given to ``target`` (dotted) in a scope."""
        for node in self._tree.nodes:
            if not isinstance(node, cst.Assign | cst.AnnAssign | cst.AugAssign) or self._tree.home(node) is not home:
                continue
            yield from self._of_assignment(node, target)

    def _of_assignment(self, node: cst.Assign | cst.AnnAssign | cst.AugAssign, target: str) -> Iterator[Written]:
        targets = [each.target for each in node.targets] if isinstance(node, cst.Assign) else [node.target]
        for each in targets:
            if dotted(each) == target:
                yield UNKNOWN if node.value is None or isinstance(node, cst.AugAssign) else Written(node.value)
            elif isinstance(each, cst.Tuple | cst.List):
                names = [dotted(element.value) for element in each.elements]
                if target in names:
                    values = node.value.elements if isinstance(node.value, cst.Tuple | cst.List) else ()
                    yield Written(values[names.index(target)].value) if len(values) == len(names) else UNKNOWN

    def _passed(self, function: cst.FunctionDef, name: str) -> list[Written]:
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
        if defaulted and default is not None:
            shown = called or function.name.value
            found.append(Written(default, f"the default of {shown}({name}=…) holds for all its callers"))
        return found or [UNKNOWN]

    # ------------------------------------------------------------------ attributes

    def _of_attribute(self, node: cst.Attribute) -> list[Written]:
        key, base = node.attr.value, dotted(node.value)
        if base is None:
            return [UNKNOWN]
        around = self._tree.class_around(node)
        if base in ("self", "cls", "self.hparams") and around is not None:
            return self._of_class(around, key, hyperparameters=base.endswith("hparams"))
        set_later = self._set_later(base, key)
        if base in self._tree.classes:
            return [*set_later, *self._of_class(self._tree.classes[base], key)]
        made = [found for source in self._sources(node.value) for found in self._of_made(source.node, key)]
        return [*set_later, *made] or [UNKNOWN]

    def _set_later(self, base: str, key: str) -> list[Written]:
        """What is assigned to ``base.key`` anywhere."""
        assignments = (
            each for each in self._tree.nodes if isinstance(each, cst.Assign | cst.AnnAssign | cst.AugAssign)
        )
        return [written for each in assignments for written in self._of_assignment(each, f"{base}.{key}")]

    def _of_made(self, maker: cst.BaseExpression | None, key: str, depth: int = 0) -> list[Written]:
        """An attribute of what an expression makes: of a class of this file, or of parsed arguments."""
        if isinstance(maker, cst.Name | cst.Attribute) and depth < DEEPEST:
            if isinstance(maker, cst.Name) and maker.value in self._tree.classes:
                return self._of_class(self._tree.classes[maker.value], key)
            made = [found for source in self._sources(maker) for found in self._of_made(source.node, key, depth + 1)]
            return [*self._set_later(dotted(maker) or "", key), *made]
        if not isinstance(maker, cst.Call) or depth == DEEPEST:
            return [UNKNOWN]
        function = last_name(maker.func)
        if isinstance(maker.func, cst.Name) and (returned := self._tree.returned(maker.func.value)):
            return [found for node in returned for found in self._of_made(node, key, depth + 1)]
        if function in ("parse_args", "parse_known_args"):
            return self._argparse_defaults(key) or [UNKNOWN]
        given = keyword(maker, key)
        if given is not None:
            return [Written(given)]
        if any(arg.star or arg.keyword is None for arg in maker.args):
            return [UNKNOWN]
        return self._of_class(self._tree.classes[function], key) if function in self._tree.classes else [UNKNOWN]

    def _of_class(self, home: cst.ClassDef, key: str, hyperparameters: bool = False) -> list[Written]:
        """An attribute of a class: as its body has it, or as a method sets it."""
        found = []
        for node in self._tree.nodes:
            if isinstance(node, cst.Assign | cst.AnnAssign | cst.AugAssign):
                if self._tree.home(node) is home:
                    found += [_field(written) for written in self._of_assignment(node, key)]
                elif self._tree.class_around(node) is home:
                    found += self._of_assignment(node, f"self.{key}")
            elif (
                hyperparameters
                and isinstance(node, cst.FunctionDef)
                and node.name.value == "__init__"
                and self._tree.home(node) is home
            ):
                found += self._passed(node, key)
        return found or [UNKNOWN]

    def _argparse_defaults(self, key: str) -> list[Written]:
        """The default in ``add_argument("--num-workers", default=4)``."""
        found = []
        for call in self._tree.calls:
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
        found = [written for display in displays for written in self._in_display(display, key, depth)]
        name = dotted(node)
        for each in self._tree.nodes:
            if name is not None and isinstance(each, cst.Assign):
                for target in each.targets:
                    if _item(target.target) == (name, key):
                        found.append(Written(each.value))
        return found

    def _in_display(self, display: cst.Dict | cst.Call, key: str, depth: int) -> list[Written]:
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
