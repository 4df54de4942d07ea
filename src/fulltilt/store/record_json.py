"""Records to plain JSON values and back, with type checks."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

# Larger than any real time, count or size. Sums of larger figures could become infinite.
_LARGEST = 1e30


def encode(value: Any, *, fully: bool = False) -> Any:
    """A record as plain JSON values. Fields at their default are left out, so that lines stay short, unless ``fully``.

    Readers outside of Fulltilt get all fields. The schema version is always written: it says which defaults those were.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {
            field.name: encode(item, fully=fully)
            for field, item in items
            if fully or field.default is dataclasses.MISSING or item != field.default or field.name == "schema_version"
        }
    if isinstance(value, tuple | list):
        return [encode(item, fully=fully) for item in value]
    if isinstance(value, float):
        # JSON has no NaN; a figure that is not finite was not measured.
        return round(value, 9) if math.isfinite(value) else None
    return value


def decode(record: type[Record], plain: Any) -> Record:
    """The record that ``plain`` describes. Unknown keys are ignored; raises ValueError for wrong values.

    NaN, infinity and absurdly large numbers become None or, where None is not allowed, the default.
    """
    try:
        return typing.cast(Record, _decoder(typing.cast(Any, record))(plain))
    except ValueError as odd:
        raise ValueError(f"{record.__name__}{odd}") from None


Decoder = Callable[[Any], Any]


def _no_measure(plain: Any) -> bool:
    return isinstance(plain, float | int) and not -_LARGEST < plain < _LARGEST


@functools.cache
def _decoder(expected: Any) -> Decoder:
    """The function that decodes a type, made once: a job of many ranks has millions of lines.

    It raises a ValueError, to which each level adds its part of the path.
    """
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        return _record_decoder(expected)
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        return _union_decoder(get_args(expected))
    if origin is tuple:
        return _tuple_decoder(get_args(expected))
    if isinstance(expected, type) and issubclass(expected, tuple):  # a NamedTuple
        items = _tuple_decoder(tuple(get_type_hints(expected).values()))
        return lambda plain: expected(*items(plain))
    return _plain_decoder(expected)


def _record_decoder(record: type[Any]) -> Decoder:
    kinds = get_type_hints(record)
    fields = []
    for field in dataclasses.fields(record):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        # Decoders of fields are looked up when needed, since a record may hold others of its own kind.
        fields.append((field.name, kinds[field.name], isinstance(field.default, float), required))

    def decode_record(plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise ValueError(f" should be an object, not {type(plain).__name__}")
        values = {}
        for name, kind, may_be_left_out, required in fields:
            if name in plain:
                item = plain[name]
                if kind is float and type(item) is float and -_LARGEST < item < _LARGEST:
                    values[name] = item
                elif not (may_be_left_out and _no_measure(item)):
                    values[name] = _decode_part(kind, item, name)
            elif required:
                raise ValueError(f".{name} is missing")
        return record(**values)

    return decode_record


def _decode_part(kind: Any, plain: Any, place: str | int) -> Any:
    try:
        return _decoder(kind)(plain)
    except ValueError as odd:
        raise ValueError(f".{place}{odd}" if isinstance(place, str) else f"[{place}]{odd}") from None


def _union_decoder(options: tuple[Any, ...]) -> Decoder:
    others = [option for option in options if option is not types.NoneType]

    def decode_union(plain: Any) -> Any:
        if plain is None or _no_measure(plain):
            if len(others) < len(options):
                return None
            raise ValueError(f" should not be {plain}")
        problem = ValueError()
        for option in others:
            try:
                return _decoder(option)(plain)
            except ValueError as odd:
                problem = odd
        raise problem

    return decode_union


def _tuple_decoder(items: tuple[Any, ...]) -> Decoder:
    of_any_length = len(items) == 2 and items[1] is Ellipsis

    def decode_tuple(plain: Any) -> tuple[Any, ...]:
        if not isinstance(plain, list):
            raise ValueError(f" should be a list, not {type(plain).__name__}")
        if not of_any_length and len(items) != len(plain):
            raise ValueError(f" should have {len(items)} items, not {len(plain)}")
        kinds = items[:1] * len(plain) if of_any_length else items
        return tuple(_decode_part(kinds[place], item, place) for place, item in enumerate(plain))

    return decode_tuple


def _plain_decoder(expected: Any) -> Decoder:
    allowed = get_args(expected)  # of a Literal

    def decode_plain(plain: Any) -> Any:
        if allowed:
            if plain in allowed:
                return plain
            raise ValueError(f" has the unknown value {plain!r}")
        if _no_measure(plain):
            raise ValueError(" is not finite")
        if expected is float and isinstance(plain, int) and not isinstance(plain, bool):
            return float(plain)
        if isinstance(plain, expected) and not (expected is int and isinstance(plain, bool)):
            return plain
        raise ValueError(f" should be {expected.__name__}, not {plain!r}")

    return decode_plain
