"""Records to plain JSON values and back, checked by their types."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

# No time, count or size comes near it. Sums of larger figures leave the finite numbers.
_LARGEST = 1e30


def encode(value: Any) -> Any:
    """A record as plain JSON values. Fields at their default are left out, so that lines stay short.

    The schema version is never left out: it tells a later reader which defaults those were.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            at_default = field.default is not dataclasses.MISSING and item == field.default
            if at_default and field.name != "schema_version":
                continue
            plain[field.name] = encode(item)
        return plain
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, float):
        # JSON has no NaN; a figure that is not finite was not measured.
        return round(value, 9) if math.isfinite(value) else None
    return value


def encode_fully(value: Any) -> Any:
    """A record as plain JSON values with every field present, for readers outside of Fulltilt."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode_fully(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [encode_fully(item) for item in value]
    return encode(value)


def decode(record: type[Record], plain: Any) -> Record:
    """The record that ``plain`` describes. Unknown keys are ignored; raises ValueError for anything else odd.

    NaN, infinity and numbers beyond all measure were not measured: None or, where the record has no None, its default.
    """
    return typing.cast(Record, _decode_as(record, plain, record.__name__))


def _no_measure(plain: Any) -> bool:
    return isinstance(plain, float | int) and not -_LARGEST < plain < _LARGEST


@functools.cache
def _field_types(record: type) -> Mapping[str, Any]:
    return get_type_hints(record)


def _decode_as(expected: Any, plain: Any, path: str) -> Any:
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        if not isinstance(plain, dict):
            raise ValueError(f"{path} should be an object, not {type(plain).__name__}")
        kinds = _field_types(expected)
        values = {}
        for field in dataclasses.fields(expected):
            item = plain.get(field.name, dataclasses.MISSING)
            if _no_measure(item) and isinstance(field.default, float):
                continue
            if item is not dataclasses.MISSING:
                values[field.name] = _decode_as(kinds[field.name], item, f"{path}.{field.name}")
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ValueError(f"{path}.{field.name} is missing")
        return expected(**values)
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(expected), plain, path)
    if origin is tuple:
        return _decode_tuple(get_args(expected), plain, path)
    if origin is Literal:
        if plain not in get_args(expected):
            raise ValueError(f"{path} has the unknown value {plain!r}")
        return plain
    if _no_measure(plain):
        raise ValueError(f"{path} is not finite")
    if expected is float and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    if isinstance(plain, expected) and not (expected is int and isinstance(plain, bool)):
        return plain
    raise ValueError(f"{path} should be {expected.__name__}, not {plain!r}")


def _decode_union(options: tuple[Any, ...], plain: Any, path: str) -> Any:
    if plain is None or _no_measure(plain):
        if types.NoneType in options:
            return None
        raise ValueError(f"{path} should not be {plain}")
    problem = None
    for option in options:
        if option is types.NoneType:
            continue
        try:
            return _decode_as(option, plain, path)
        except ValueError as error:
            problem = error
    raise problem or ValueError(f"{path} has the unexpected value {plain!r}")


def _decode_tuple(items: tuple[Any, ...], plain: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(plain, list):
        raise ValueError(f"{path} should be a list, not {type(plain).__name__}")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_decode_as(items[0], item, f"{path}[{i}]") for i, item in enumerate(plain))
    if len(items) != len(plain):
        raise ValueError(f"{path} should have {len(items)} items, not {len(plain)}")
    return tuple(
        _decode_as(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(items, plain, strict=True))
    )
