"""Which call of a source file makes a loader, and what it takes. Needs libcst; imported late."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import libcst as cst

from fulltilt.tuning.source_tree import SourceTree, bound_otherwise, dotted, keyword, last_name

# The order of DataLoader's positional arguments.
POSITIONS = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context"),
)

# A class over a class of the same file; nobody builds more floors.
_DEEPEST = 5

# What a change of the source may write.
SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "batch_size")


class Unclear(Exception):  # noqa: N818 - reads as the sentence it is
    """Why a call or an argument's value cannot be changed."""


class LoaderCalls:
    """The calls of DataLoader, and of classes of this file, in a module. ``given``: see Places."""

    def __init__(self, tree: SourceTree, given: Collection[str]) -> None:
        self._tree = tree
        self._given = frozenset(given)
        self._partials = dict(_partials(tree))
        self._loaders = {"DataLoader", *_other_names(tree)}

    def at(self, line: int) -> cst.Call:
        """The call that makes the loader at a line: of DataLoader, or of a class of this file. Raises Unclear."""
        begins, ends = self._tree.begins, self._tree.ends
        around = [call for call in self._tree.calls if begins(call) <= line <= ends(call)]
        named = [call for call in around if self.is_loader(call)]
        own = [call for call in around if begins(call) == line and self._is_own_loader(last_name(call.func))]
        found = named or own
        if not found:
            others = [self._tree.code(call.func) for call in around if begins(call) == line]
            made_by = f", it is made by {others[0]}(...)" if len(others) == 1 else ""
            raise Unclear(f"no DataLoader(...) call stands at line {line}{made_by}")
        nearest = max(begins(call) for call in found)
        found = [call for call in found if begins(call) == nearest]
        if len(found) > 1:
            found = [call for call in found if self._names(call) == self._given]
        if len(found) != 1:
            raise Unclear(f"several loaders are made at line {line}")
        return found[0]

    def is_loader(self, call: cst.Call) -> bool:
        """Whether a call names DataLoader, or a class that is called so."""
        return (last_name(call.func) or "").endswith("DataLoader") or self._is_torchs(call)

    def _is_own_loader(self, name: str | None, depth: int = 0) -> bool:
        """Whether a class of this file makes loaders: a data set that is made in the same line does not."""
        home = self._tree.classes.get(name or "")
        if home is None or depth == _DEEPEST:
            return False
        bases = [last_name(base.value) for base in home.bases]
        named = any((each or "").endswith("Loader") or each in self._loaders for each in (name, *bases))
        return named or any(self._is_own_loader(base, depth + 1) for base in bases)

    def _is_torchs(self, call: cst.Call) -> bool:
        return last_name(call.func) in self._loaders or self._partial(call) is not None

    def _partial(self, call: cst.Call) -> cst.Call | None:
        """The ``partial(DataLoader, …)`` that is called, where its name means nothing else in the call's scope."""
        name, home = dotted(call.func) or "", self._tree.home(call)
        made = self._partials.get(name)
        is_parameter = isinstance(home, cst.FunctionDef) and name in parameters(home, whole=True)
        seen = made is not None and self._tree.home(made) in (None, home) and not is_parameter
        return made if seen else None

    def constructor(self, call: cst.Call) -> cst.FunctionDef | None:
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

    def why_not(self, call: cst.Call, name: str) -> str | None:
        """Why an argument that is not written in a call cannot be added to it; None where it can."""
        shown = f"{self._tree.code(call.func)}(...)"
        constructor = self.constructor(call)
        if constructor is None:
            return f"{name} is given to {shown} in a way that is not followed" if name in self._given else None
        passes_on = isinstance(constructor.params.star_kwarg, cst.Param) and name not in self._given
        if passes_on or name in parameters(constructor):
            return None
        return f"{shown} does not take {name}: its constructor sets it"

    def written(self, call: cst.Call, name: str) -> cst.BaseExpression | None:
        """What stands for an argument in a call, by its keyword or its position."""
        constructor = self.constructor(call)
        positions: Sequence[str] = POSITIONS if constructor is None else parameters(constructor)
        for index, arg in enumerate(call.args):
            if arg.star == "*":
                positions = ()  # what stands behind it has no known place
            elif arg.keyword is not None:
                if arg.keyword.value == name:
                    return arg.value
            elif not arg.star and index < len(positions) and positions[index] == name:
                return arg.value
        made_from = self._partial(call)
        return None if made_from is None else keyword(made_from, name)

    def _names(self, call: cst.Call) -> set[str]:
        """The arguments that are written in a call."""
        names = [arg.keyword.value if arg.keyword is not None else None for arg in call.args if not arg.star]
        return {name or POSITIONS[index] for index, name in enumerate(names) if name or index < len(POSITIONS)}


def _other_names(tree: SourceTree) -> Iterator[str]:
    """``DL`` for ``import DataLoader as DL`` and for ``DL = DataLoader``."""
    for node in tree.nodes:
        if isinstance(node, cst.ImportAlias) and last_name(node.name) == "DataLoader" and node.asname is not None:
            yield from bound_otherwise(node.asname)
        elif isinstance(node, cst.Assign) and last_name(node.value) == "DataLoader":
            yield from (name for each in node.targets if (name := dotted(each.target)))


def _partials(tree: SourceTree) -> Iterator[tuple[str, cst.Call]]:
    """``make`` for ``make = partial(DataLoader, num_workers=4)``, where nothing else is called so."""
    assigned = [
        (name, node.value)
        for node in tree.nodes
        if isinstance(node, cst.Assign)
        for each in node.targets
        if (name := dotted(each.target))
    ]
    for name, value in assigned:
        if not isinstance(value, cst.Call) or last_name(value.func) != "partial" or not value.args:
            continue
        loader, *others = value.args
        by_keyword = all(arg.keyword is not None for arg in others)
        if by_keyword and last_name(loader.value) == "DataLoader" and [each for each, _ in assigned].count(name) == 1:
            yield name, value


def parameters(function: cst.FunctionDef, whole: bool = False) -> list[str]:
    """The names of a method's parameters without self, or ``whole``: of any function's."""
    found = [*function.params.posonly_params, *function.params.params, *function.params.kwonly_params]
    return [parameter.name.value for parameter in found][not whole :]
