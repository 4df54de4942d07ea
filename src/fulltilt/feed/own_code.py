"""Which code is the user's own, and what a function of it uses."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

STANDARD = sys.stdlib_module_names - {"__main__"}


def own_module(name: str | None) -> bool:
    """Whether a module belongs to the user: installed libraries are covered by their versions."""
    if name is None or name == "__main__":  # also under a launcher, whose own file __main__ then is
        return True
    if name.split(".")[0] in STANDARD:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or ("site-packages" not in file and "dist-packages" not in file)


def names_in(code: types.CodeType) -> list[str]:
    """The names that ``code`` and the functions within it look up, sorted."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return sorted(set(code.co_names).union(*inner))


def used_by(function: types.FunctionType) -> Iterator[Any]:
    """The globals that ``function`` uses; of the user's own modules, those of their names that it uses."""
    names = names_in(function.__code__)
    for name in names:
        if name in function.__globals__:
            yield from _used(function.__globals__[name], names)
        elif name in sys.modules:  # imported within the function
            yield from _used(sys.modules[name], names)


def _used(value: Any, names: Iterable[str]) -> Iterator[Any]:
    if not isinstance(value, types.ModuleType) or not own_module(value.__name__):
        yield value
        return
    for name in names:
        inner = vars(value).get(name)
        if inner is not None and inner is not value:
            yield from _used(inner, [other for other in names if other != name])
