"""Where a DataLoader was constructed, and what was written there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from fulltilt.recorder.owners import owner, shown_path

# What a loader is ``made_by`` when the engine has made it from the settings of a training.
ENGINE = "fulltilt"


class CallSites(NamedTuple):
    """Where a loader was constructed: the user's line, the library that line calls, and the nearest lines of all."""

    where: str | None
    made_by: str | None
    nearest: tuple[str, ...]


def call_sites(loader: Any, most: int = 4) -> CallSites:
    """The calls that led to the construction of a loader, outside of torch and of the construction itself."""
    sites: list[str] = []
    where: str | None = None
    library: str | None = None
    constructors = _constructors(type(loader))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (where is None or len(sites) < most):
        code = frame.f_code
        who = owner(code.co_filename)
        if who in ("user", "site") and code not in constructors:
            sites.append(f"{shown_path(code.co_filename)}:{frame.f_lineno}")
            if where is None and who == "user":
                where = sites[-1]
            elif where is None and library != ENGINE:
                library = str(frame.f_globals.get("__name__", "")).partition(".")[0] or None
        elif who == "fulltilt" and where is None and not _only_observes(code.co_filename):
            library = ENGINE
        frame = frame.f_back
    if library == ENGINE:
        # Settings make the loader; on the line that starts the training there is nothing to change.
        return CallSites(None, ENGINE, tuple(sites[:most]))
    return CallSites(where or (sites[0] if sites else None), library, tuple(sites[:most]))


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


def _only_observes(filename: str) -> bool:
    """Whether a file of Fulltilt's stands in a call of the user's, rather than making one of its own."""
    path = filename.replace("\\", "/")
    return "/fulltilt/recorder/" in path or "/fulltilt/tuning/" in path


def given_arguments(original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The names of the arguments that the user wrote in a DataLoader(...) call."""
    try:
        bound = inspect.signature(original).bind(None, *args, **kwargs)
    except TypeError:
        return tuple(kwargs)
    return tuple(name for name in bound.arguments if name != "self")
