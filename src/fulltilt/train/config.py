"""Configs read strictly: every problem is listed at once, with what was probably meant, before any work is done."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from operator import ge, gt, le
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fulltilt.errors import UsageError

Record = TypeVar("Record")

# A config is written by hand. More than this is a mistake or an attack, and YAML takes long over it.
MOST_CONFIG_BYTES = 256 * 1024
# Whole numbers without a bound of their own. No job has more of anything, and what counts for torch and files holds it.
MOST_OF_ANYTHING = 2**31 - 1
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def load(path: Path, record: type[Record]) -> Record:
    """A settings record from a YAML, TOML or JSON file. Raises UsageError listing every problem."""
    return parse(read(path), record, str(path))


def read(path: Path) -> dict[str, Any]:
    """The plain values of a config file. Raises UsageError for what is not a flat, harmless mapping."""
    try:
        raw = path.read_bytes()
        if len(raw) > MOST_CONFIG_BYTES:
            raise UsageError(f"{path} has {len(raw):,} bytes; a config has at most {MOST_CONFIG_BYTES:,}")
        text = raw.decode("utf-8")
        if path.suffix in (".yaml", ".yml"):
            content = _read_yaml(text)
        elif path.suffix == ".toml":
            content = tomllib.loads(text)
        elif path.suffix == ".json":
            content = json.loads(text, object_pairs_hook=_no_repeats)
        else:
            raise UsageError(f"{path}: configs end in .yaml, .yml, .toml or .json")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        first = str(error).strip().splitlines() or ["too deeply nested"]
        raise UsageError(f"{path} is not a valid config: {first[0][:200]}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} should hold names and values, not {type(content).__name__}")
    for key in content:
        if not isinstance(key, str):
            raise UsageError(f"{path}: {_short(key)} is no name of a setting")
    return content


def parse(
    given: Mapping[str, Any],
    record: type[Record],
    source: str = "settings",
    *,
    problems: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> Record:
    """A frozen record from plain values. No unknown key is accepted; durations may be written as ``11h``.

    ``problems`` that are known already are told with the others; ``names`` has what the user calls a key, if not so.
    """
    fields = {field.name: field for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    kinds = _hints(record)  # type: ignore[arg-type, unused-ignore]
    found, values = [*problems], {}
    for key, value in given.items():
        if key not in fields:
            found.append(f"{_short(key)}: there is no such setting{_suggestion(key, fields)}")
            continue
        problem, values[key] = _converted(kinds[key], value, key, fields[key].metadata)
        if problem:
            found.append(f"{(names or {}).get(key, key)}: {problem}")
    if not found:
        made = record(**values)
        found = made.problems() if hasattr(made, "problems") else []
        if not found:
            return made
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    raise UsageError("\n".join([f"{count} in {source}:", *found]))


def checked(made: Record) -> Record:
    """A record that was made in code, held to the rules of one from a file. Raises UsageError listing every problem."""
    given = {field.name: _plain(getattr(made, field.name)) for field in dataclasses.fields(made)}  # type: ignore[arg-type]
    return parse(given, type(made))


def _plain(value: Any) -> Any:
    """A number of numpy's or torch's as Python's own."""
    return value.item() if hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0 else value


@functools.cache
def _hints(record: type[Any]) -> dict[str, Any]:
    return get_type_hints(record)


def _suggestion(key: object, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(str(key)[:80].replace("-", "_"), known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _converted(kind: Any, value: Any, key: str, bounds: Mapping[str, Any]) -> tuple[str | None, Any]:
    """What is wrong with ``value``, or None and the value as the field wants it."""
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if value is None:
        return (None, None) if types.NoneType in options else ("should not be empty", None)
    wanted = next(option for option in options if option is not types.NoneType)
    if get_origin(wanted) is tuple:
        if not isinstance(value, list | tuple):
            return f"should be a list, not {_short(value)}", None
        each = [_converted(get_args(wanted)[0], item, key, bounds) for item in value]
        return next((problem for problem, _ in each if problem), None), tuple(item for _, item in each)
    if get_origin(wanted) is Literal:
        choices = get_args(wanted)
        if isinstance(value, str) and value in choices:
            return None, value
        close = difflib.get_close_matches(str(value)[:80], choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"should be one of {', '.join(choices)}, not {_short(value)}{hint}", None
    if wanted is float and key.endswith("_s") and isinstance(value, str):
        value = duration_s(value)
        if value is None:
            return "should be a duration such as 90s, 30m or 11h", None
    if wanted is float and type(value) is int:
        value = float(value) if abs(value) < 2**63 else math.inf
    if type(value) is not wanted:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        return f"should be {names[wanted]}, not {_short(value)}", None
    return _out_of_bounds(value, bounds), value


def _out_of_bounds(value: Any, bounds: Mapping[str, Any]) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"should be a finite number, not {value}"
    own_most = bounds.get("most")
    most = MOST_OF_ANYTHING if own_most is None and type(value) is int else own_most
    for bound, words, holds in (
        (bounds.get("least"), "at least", ge),
        (bounds.get("above"), "above", gt),
        (most, "at most", le),
    ):
        if bound is not None and not holds(value, bound):
            told = f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
            return f"should be {words} {told}, not {_short(value)}"
    return None


def duration_s(text: str) -> float | None:
    """Seconds of ``90``, ``90s``, ``30m``, ``11h`` or ``1h30m``; None when it is no duration."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smhd])?\s*", text.strip())
    whole = re.fullmatch(r"(?:\d+(?:\.\d+)?\s*(?:min|[smhd])\s*)+|\d+(?:\.\d+)?", text.strip())
    return sum(float(number) * _SECONDS[unit or "s"] for number, unit in parts) if whole else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        repeated = next(key for i, (key, _) in enumerate(pairs) if key in [k for k, _ in pairs[:i]])
        raise ValueError(f"{_short(repeated)} is given twice")
    return content


def _read_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        remedy = "Install it with: pip install 'fulltilt[recipes]', or write the config as TOML or JSON."
        raise UsageError("reading YAML needs PyYAML", remedy) from error

    class StrictLoader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        """Plain values only: no aliases (a few lines of them can stand for gigabytes), no repeated keys."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("aliases (*name) are not allowed in a config")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            _no_repeats([(str(key), None) for key in keys])
            return dict(super().construct_mapping(node, deep))

    # YAML 1.1 reads 2e-5 as text because it lacks a dot. Everybody means the number.
    StrictLoader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    try:
        return yaml.load(text, Loader=StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{getattr(error, 'problem', None) or 'not YAML'}") from error
