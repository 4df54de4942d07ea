"""The DataLoader(...) call in the user's source with other arguments, through libcst: formatting and comments stay.

An argument is changed where its value is written: in the call itself, in the dict that is unpacked into it, in the
variable, parameter, class attribute or config that it names. Where that is not one literal with the value that was seen
in force, nothing is guessed: the answer is a sentence and what to write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fulltilt.errors import MachineError

if TYPE_CHECKING:
    import libcst as cst

    from fulltilt.tuning.source_places import Places

DEFAULTS: Mapping[str, object] = {
    "num_workers": 0,
    "prefetch_factor": None,
    "pin_memory": False,
    "persistent_workers": False,
    "batch_size": 1,
}


NEED_WORKERS = ("prefetch_factor", "persistent_workers")
# torch's own default, not worth writing.
ONCE_THERE_ARE_WORKERS: Mapping[str, object] = {"prefetch_factor": 2}


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The new source, and what the reader of the diff should know besides."""

    source: str
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Why the source was not changed."""

    why: str


def rewrite_call(
    source: str,
    line: int,
    wanted: Mapping[str, object],
    in_force: Mapping[str, object],
    given: Collection[str] = (),
) -> Rewritten | Refused:
    """The source with ``wanted`` in force for the DataLoader call at ``line``.

    ``in_force`` is what the call ran with before: a literal is only changed where it says the same. ``given`` are the
    arguments that it was seen with.
    """
    try:
        import libcst
    except ImportError as error:
        raise MachineError("the diff of the source needs libcst", "Install it: pip install fulltilt[tune]") from error
    from fulltilt.tuning.source_loaders import Unclear
    from fulltilt.tuning.source_places import Places

    try:
        module = libcst.parse_module(source)
    except libcst.ParserSyntaxError as error:
        return Refused(f"the file does not parse: {error.message}")
    if module.code != source:  # a form feed before an indented line is lost
        return Refused("it holds characters that would not survive a change by machine")
    places = Places(module, given)
    try:
        return _rewrite(places, places.loader_call(line), wanted, in_force)
    except Unclear as unclear:
        return Refused(str(unclear))


def _rewrite(
    places: Places, call: cst.Call, wanted: Mapping[str, object], in_force: Mapping[str, object]
) -> Rewritten | Refused:
    """The call with the settings that are not in force yet. Raises Unclear."""
    replacements: dict[cst.CSTNode, cst.CSTNode] = {}
    added: dict[str, str] = {}
    remarks: list[str] = []
    for name, value in sorted(wanted.items(), key=lambda item: item[0] != "num_workers"):
        if value == in_force.get(name) or (value is None and name not in in_force):
            continue
        if value is True and name in NEED_WORKERS and places.comes_with_workers(call, name):
            continue
        place = places.of_argument(call, name, in_force.get(name, DEFAULTS.get(name)))
        if place is not None and place.is_none and value == ONCE_THERE_ARE_WORKERS.get(name, ...):
            continue
        code = repr(value)
        # The same call may make a loader without workers elsewhere, which torch then refuses to keep or prefetch for.
        workers = places.variable_workers(call, replacements) if name in NEED_WORKERS and value else None
        if workers is not None and (place is None or (places.stands_in(call, place) and not place.guarded)):
            code = f"{workers} > 0" if value is True else f"{code} if {workers} > 0 else None"
        elif workers is not None and place is not None and not place.guarded and not in_force.get(name):
            replacements |= places.guarded(call, name, workers, is_flag=value is True)
        if place is not None:
            replacements[place.node] = place.replacement(code)
            remarks += place.remarks
        elif value != ONCE_THERE_ARE_WORKERS.get(name, ...):
            added[name] = code
    if not replacements and not added:
        return Refused("the call has these settings already")
    home = places.dict_with_workers(call, replacements.keys()) if added else None
    if home is not None:
        replacements[home.node] = home.with_entries(added, replacements)
    elif added:
        replacements[call] = places.with_keywords(call, added, replacements)
    remarks += places.reach(call, replacements)
    return Rewritten(places.replaced(replacements), tuple(dict.fromkeys(remarks)))
