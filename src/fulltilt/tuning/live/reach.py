"""What code of the user's own uses beside its arguments: globals, attributes of their modules and classes, closures.

A worker has all of it as it was at the fork, as it has the data set's attributes.
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from fulltilt.recorder.user_code import owner

# How code asks for environment variables, which a worker has as they were at its start.
ENVIRONMENT = frozenset({"environ", "getenv"})
# These run when nothing is fetched.
NOT_FETCHING = frozenset({"__init__", "__new__", "__repr__", "__str__"})


def used_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Name and value of all that a function of the user's own takes from around it; nothing for other code."""
    if owner(function.__code__.co_filename) != "user":
        return
    global_names, attributes = _names(function.__code__)
    if not ENVIRONMENT.isdisjoint(global_names | attributes):
        yield "os.environ", hash(frozenset(os.environ.items()))
    for name in sorted(global_names & function.__globals__.keys()):
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, types.ModuleType | type) and is_users(value):
            members = vars(value)
            yield from (
                (f"{name}.{attribute}", members[attribute]) for attribute in sorted(attributes & members.keys())
            )
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue


def globals_of(code: types.FunctionType | type) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Where the globals stand, and their names, that a function or the methods of a class of the user's own read.

    The functions and classes behind them are followed, and what a class has for all its objects counts as a global.
    """
    todo: list[Any] = [code]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for home, name in _state_of(each) if isinstance(each, type) else _read_by(each):
            value = home.get(name)
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(value, types.FunctionType | type):
                todo.append(value)
            else:
                yield home, name
        if isinstance(each, types.FunctionType):  # behind a decorator
            todo += [inner for inner in contents(each) if isinstance(inner, types.FunctionType)]


def contents(function: types.FunctionType) -> list[Any]:
    """What a function holds of the one that it was made in."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    return found


def _read_by(function: types.FunctionType) -> Iterator[tuple[Mapping[str, Any], str]]:
    if owner(function.__code__.co_filename) != "user":
        return
    global_names, attributes = _names(function.__code__)
    for name in sorted(global_names & function.__globals__.keys()):
        yield function.__globals__, name
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType) and is_users(value):
            yield from ((vars(value), attribute) for attribute in sorted(attributes & vars(value).keys()))


def _state_of(kind: type) -> Iterator[tuple[Mapping[str, Any], str]]:
    for cls in kind.__mro__:
        if is_users(cls):
            yield from ((vars(cls), name) for name, _ in _members(cls))


def methods_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Name and value of what the user's own classes behind an object define: methods, and state that all share."""
    for cls in kind.__mro__:
        if is_users(cls):
            yield from ((f"class {cls.__name__}.{name}", value) for name, value in _members(cls))


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(cls).items()):
        is_code = isinstance(value, types.FunctionType)
        if name not in NOT_FETCHING and (is_code or not name.startswith("__")):
            yield name, value


def is_users(value: types.ModuleType | type) -> bool:
    """Whether a module or a class is of the user's own code."""
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    path = getattr(module, "__file__", None)
    if path is None:  # a notebook's
        return getattr(module, "__name__", None) == "__main__"
    return owner(path) == "user"


@cache
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals that code reads, and the attributes that it may take of anything; functions inside it included."""
    global_names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    attributes = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            global_names |= inner[0]
            attributes |= inner[1]
    return frozenset(global_names), frozenset(attributes)
