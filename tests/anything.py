"""Any value of a record's type, for property tests."""

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

# Any text, and the low surrogates with which Python carries the bytes of a path that is not UTF-8.
TEXT = st.text(
    st.characters(exclude_categories=("Cs",)) | st.integers(0xDC80, 0xDCFF).map(chr),
    max_size=8,
)
# The store keeps nine decimals: a nanosecond is the finest figure that Fulltilt measures.
# Numbers from 1e30 on count as not measured.
FLOATS = st.floats(-1e29, 1e29).map(lambda value: round(value, 9))


LEAVES: dict[type, st.SearchStrategy[Any]] = {
    str: TEXT,
    float: FLOATS,
    int: st.integers(-(10**29), 10**29),
    bool: st.booleans(),
    types.NoneType: st.none(),
}
PHYSICAL = {float: st.floats(0, 1e12), int: st.integers(0, 2**50)}


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a record's field type."""
    return _any_of(kind, {})


def any_physical(kind: Any) -> st.SearchStrategy[Any]:
    """Values that a machine could show: no negative sizes, nothing beyond a petabyte."""
    return _any_of(kind, PHYSICAL)


def _any_of(kind: Any, only: dict[type, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        own = {f.name: hints[f.name] for f in dataclasses.fields(kind) if hints[f.name] != tuple[kind, ...]}
        return st.builds(kind, **{name: _any_of(hint, only) for name, hint in own.items()})
    if get_origin(kind) in (Union, types.UnionType):
        return st.one_of(*(_any_of(option, only) for option in get_args(kind)))
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        items = get_args(kind)
        if items[1:] == (Ellipsis,):
            return st.lists(_any_of(items[0], only), max_size=2).map(tuple)
        return st.tuples(*(_any_of(item, only) for item in items))
    return only.get(kind, LEAVES[kind])
