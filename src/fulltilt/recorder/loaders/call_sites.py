"""Where a loader was constructed, and with which arguments."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from fulltilt.recorder.stacks.frames import callers, shown_line
from fulltilt.recorder.user_code import own_package, owner

# What a loader is ``made_by`` when the engine has made it from the settings of a training.
ENGINE = "fulltilt"
# Packages of Fulltilt that only take part in a call of the user's, and make no loaders of their own.
OBSERVING = ("recorder", "tuning")
# This library makes loaders out of those that the user, or another library, has made.
PASSES_ON = "accelerate"
NEAREST_SITES = 4  # so many lines tell the call sites of two loaders apart


class CallSites(NamedTuple):
    """Where a loader was constructed: the user's line, the library that line calls, and the nearest lines of all."""

    where: str | None
    made_by: str | None
    nearest: tuple[str, ...]


def call_sites(loader: Any) -> CallSites:
    """The calls that led to the construction of a loader, outside of torch and of the construction itself."""
    sites: list[str] = []
    where: str | None = None
    library: str | None = None
    constructors = _constructors(type(loader))
    for frame in callers(sys._getframe(1)):
        if where is not None and len(sites) >= NEAREST_SITES:
            break
        code = frame.f_code
        who = owner(code.co_filename)
        if who in ("user", "site") and code not in constructors:
            sites.append(shown_line(frame))
            if where is None and who == "user":
                where = sites[-1]
            elif where is None and library in (None, PASSES_ON):
                library = str(frame.f_globals.get("__name__", "")).partition(".")[0] or None
        elif who == "fulltilt" and where is None and own_package(code.co_filename) not in OBSERVING:
            library = ENGINE
    if library == ENGINE:
        # Settings make the loader; on the line that starts the training there is nothing to change.
        return CallSites(None, ENGINE, tuple(sites[:NEAREST_SITES]))
    return CallSites(where or (sites[0] if sites else None), library, tuple(sites[:NEAREST_SITES]))


def _constructors(kind: type) -> set[CodeType]:
    """The code of the constructors of a class and its bases, with the wrappers that libraries put around them.

    Known by their code and not by their ``self``: reading a frame's locals keeps all of them alive until it returns.
    """
    found: set[CodeType] = set()
    for base in kind.__mro__:
        function = vars(base).get("__init__")
        while function is not None:
            if isinstance(function, FunctionType):
                found.add(function.__code__)
            function = getattr(function, "__wrapped__", None)
    return found


def named_arguments(
    original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a DataLoader(...) call by name; None where the class only passes them on, without names."""
    signature = inspect.signature(original)
    try:
        given = dict(signature.bind(None, *args, **kwargs).arguments)
    except TypeError:
        return None  # the constructor itself will complain
    given.pop("self", None)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL and name in given:
            return None
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return given
