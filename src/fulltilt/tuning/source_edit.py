"""The winning settings as a unified diff of the user's source, applied on request; or what to write by hand.

Only the DataLoader call of the training loader is changed, and of its arguments only literals that have the value seen
in force, and missing ones. For everything else the user is told what to write.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulltilt.diagnosis.findings import made_for_each_pass
from fulltilt.diagnosis.libraries import LIBRARIES, Library, loader_call
from fulltilt.errors import MachineError, UsageError
from fulltilt.records import LoaderRecord, Settings
from fulltilt.store.owned_folder import write_named_file
from fulltilt.tuning.search_space import DEFAULT_PREFETCH, LOADER_SETTINGS

DEFAULTS: Mapping[str, object] = {
    "num_workers": 0,
    "prefetch_factor": None,
    "pin_memory": False,
    "persistent_workers": False,
    "batch_size": 1,
}
# Classes with DataLoader's keywords.
LOADERS = ("DataLoader", "StatefulDataLoader", "StreamingDataLoader", "ThreadDataLoader")
NEED_WORKERS = ("prefetch_factor", "persistent_workers")
# torch draws a seed whenever workers start, from the generator that also shuffles.
OTHER_SHUFFLES = (
    "persistent workers are seeded once, so from the second epoch on the data is shuffled in another order than before"
)
SEVERAL_LOADERS = "this line also makes other loaders, which change with it"
MAKE_ONCE = "the loader is made again for each epoch; made once before the loop, it could have persistent workers"


@dataclass(frozen=True, slots=True)
class SourceChange:
    """A change of one file. ``old`` and ``new`` are its whole text, byte for byte."""

    path: Path
    old: bytes
    new: bytes
    diff: str
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ManualChange:
    """Why there is no diff, and what to write instead."""

    why: str
    write: str


def propose(
    loader: LoaderRecord | None,
    in_force: Settings,
    working_folder: Path,
    command: tuple[str, ...] = (),
    with_batch: bool = False,
) -> SourceChange | ManualChange:
    """The change that writes the loader settings of ``in_force`` into the user's source."""
    names = (*LOADER_SETTINGS, *(["batch_size"] if with_batch else []))
    wanted = {name: value for name in names if (value := getattr(in_force, name)) is not None}
    if loader is not None and loader.made_by == "fulltilt":
        flags = {"--workers": wanted.get("num_workers"), "--batch-size": wanted.get("batch_size")}
        given = " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)
        return ManualChange("Fulltilt makes the loader from its settings", given)
    made_again = loader is not None and made_for_each_pass(loader)
    for name in NEED_WORKERS:
        # Workers do not outlive their loader.
        if not in_force.num_workers or (made_again and name == "persistent_workers"):
            wanted.pop(name, None)
    if loader is None or loader.where is None:
        return ManualChange("the line that makes the training loader is unknown", _call("DataLoader(…", wanted))
    before = {name: getattr(loader, name) for name in names}
    news = {name: value for name, value in wanted.items() if value != _or_default(name, before[name])}
    by_hand = _call("DataLoader(…", news)
    library = LIBRARIES.get(loader.made_by or "")
    if loader.made_by is not None:
        by_hand = loader_call(loader.made_by, news) or by_hand
        if library is None or not library.functions:
            return ManualChange(f"{loader.made_by} makes the loader ({loader.where})", by_hand)
    for flag in (argument.split("=")[0] for argument in command if argument.startswith("--")):
        name = flag.lstrip("-").replace("-", "_")
        if name in news:
            return ManualChange(f"{flag} is given on the command line", f"{flag} {news[name]}")
    file, _, line = loader.where.rpartition(":")
    path = source_file(loader.where, working_folder, command)
    try:
        old = path.read_bytes()
        if library is None:
            new, several = edit_call(old, int(line), news, before, loader.given)
        else:
            new, several = edit_librarys_call(old, library, news, before)
    except OSError as error:
        return ManualChange(f"{file} could not be read: {error}", by_hand)
    except CannotEdit as unclear:
        return ManualChange(f"{loader.where}: {unclear}", by_hand)
    shuffles_otherwise = bool(loader.shuffle) and news.get("persistent_workers") is True
    told_of = {SEVERAL_LOADERS: several, OTHER_SHUFFLES: shuffles_otherwise, MAKE_ONCE: made_again}
    remarks = tuple(remark for remark, is_so in told_of.items() if is_so)
    return SourceChange(path, old, new, _unified_diff(file, old, new), remarks)


def _or_default(name: str, value: object) -> object:
    """A setting as it is in force once there are workers."""
    return DEFAULT_PREFETCH if name == "prefetch_factor" and value is None else value


def _call(opening: str, arguments: Mapping[str, object]) -> str:
    return f"{opening}, {', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _unified_diff(name: str, old: bytes, new: bytes) -> str:
    """A diff that `git apply` and `patch -p1` take."""
    # Lines of bytes: a form feed ends a line of text, but none to git and patch.
    before, after = ([line.decode() for line in data.splitlines(keepends=True)] for data in (old, new))
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def source_file(where: str, working_folder: Path, command: Sequence[str]) -> Path:
    """The file of a recorded place, relative to the working folder, or to the script's where that lies elsewhere."""
    file = where.rpartition(":")[0]
    script = working_folder / next((argument for argument in command if argument.endswith(".py")), "")
    is_elsewhere = not script.resolve().is_relative_to(working_folder.resolve())
    beside = script.parent / file
    return beside if is_elsewhere and beside.is_file() else working_folder / file


def fingerprint(path: Path) -> str | None:
    """The SHA-256 of a file; None where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def apply_change(change: SourceChange, studied_sha256: str | None) -> None:
    """Write the change, whole or not at all. Raises UsageError when the file has changed since the study."""
    proposed_for = hashlib.sha256(change.old).hexdigest()
    if fingerprint(change.path) != proposed_for or studied_sha256 not in (None, proposed_for):
        raise UsageError(f"{change.path} has changed since it was studied; nothing was written", "Tune it again.")
    path = change.path.resolve()  # a link stays one
    if not os.access(path, os.W_OK):
        raise MachineError(f"cannot write {path}: it is read-only", "Make it writable, or apply the diff yourself.")
    before = path.stat()
    if before.st_nlink > 1:
        raise MachineError(f"{path} has other names (hard links), which would keep the old text", "Apply the diff.")
    try:
        write_named_file(path, change.new, signature=change.old[:4096], keep_owner=True)
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror or error}") from error


# --------------------------------------------------------------------------- the call


class CannotEdit(Exception):  # noqa: N818 - no error of the user's
    """Why a call cannot be changed."""


def edit_call(
    source: bytes, line: int, wanted: Mapping[str, Any], before: Mapping[str, object], given: Collection[str] = ()
) -> tuple[bytes, bool]:
    """The source with ``wanted`` in the DataLoader call at ``line``, and whether that call makes several loaders.

    ``before`` are the settings in force, ``given`` the names of the arguments it was called with. Raises CannotEdit.
    """
    module = _parsed(source)
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    around = [call for call in calls if call.lineno <= line <= (call.end_lineno or 0) and _name(call) in LOADERS]
    found = [call for call in around if call.lineno == max(each.lineno for each in around)]
    if len(found) != 1:
        raise CannotEdit(f"there is no single DataLoader(...) call at line {line}")
    source = _with_keywords(source, module, found[0], wanted, before, DEFAULTS, given)
    makers = {
        node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and found[0] in ast.walk(node)
    }
    return source, any(sum(_name(each) == maker for each in calls) > 1 for maker in makers)


def edit_librarys_call(
    source: bytes, library: Library, wanted: Mapping[str, Any], before: Mapping[str, object]
) -> tuple[bytes, bool]:
    """As ``edit_call``, for the only call of the library that takes these settings. Raises CannotEdit."""
    module = _parsed(source)
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and _name(node) in library.functions]
    if len(calls) != 1:
        raise CannotEdit(f"there is no single call of {library.call.partition('(')[0]} in this file")
    if any(keyword.arg is None for keyword in calls[0].keywords):
        raise CannotEdit("its arguments are given as **arguments, which are not followed")
    theirs, were = (
        {library.names[name]: value for name, value in settings.items() if name in library.names}
        for settings in (wanted, before)
    )
    batch = library.names.get("batch_size")
    if batch in theirs and len(calls[0].args) > 2 and not any(keyword.arg == batch for keyword in calls[0].keywords):
        raise CannotEdit(f"{batch} may be one of its arguments without a name")  # timm's third
    # An argument that is missing there had the library's default.
    return _with_keywords(source, module, calls[0], theirs, were, were, ()), False


def _parsed(source: bytes) -> ast.Module:
    try:
        source.decode()
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise CannotEdit(f"the file does not parse as UTF-8: {error}") from error


def _with_keywords(
    source: bytes,
    module: ast.Module,
    call: ast.Call,
    wanted: Mapping[str, Any],
    before: Mapping[str, object],
    defaults: Mapping[str, object],
    given: Collection[str],
) -> bytes:
    splices, added = list[tuple[int, int, str]](), ""
    written = {keyword.arg: keyword for keyword in call.keywords}
    begins = [0]
    for text in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(text))

    def end_of(node: ast.expr | ast.keyword) -> int:
        return begins[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    last = max(map(end_of, arguments), default=None)
    for name, value in wanted.items():
        # With a variable number of workers, torch might refuse settings that need workers.
        for which in (name, "num_workers") if name in NEED_WORKERS else (name,):
            keyword = written.get(which)
            if keyword is None and which in given:
                raise CannotEdit(f"{which} reaches DataLoader(...) in a way that is not followed")
            if keyword is not None and not isinstance(keyword.value, ast.Constant):
                flag = _flag_of(module, keyword.value)
                what = f"which {flag} sets on the command line" if flag else "not a number or a word"
                raise CannotEdit(f"{which} is {ast.unparse(keyword.value)} there, {what}")
        keyword = written.get(name)
        now = keyword.value.value if keyword is not None else defaults[name]  # type: ignore[attr-defined]
        if now == value:  # written since
            continue
        if _or_default(name, now) != _or_default(name, before.get(name, defaults[name])):
            raise CannotEdit(f"{name} is {now!r} there, but {before.get(name)!r} was in force")
        if keyword is not None:
            splices.append((begins[keyword.value.lineno - 1] + keyword.value.col_offset, end_of(keyword), repr(value)))
            keyword.value = ast.Constant(value)
        elif last is None:
            raise CannotEdit("the call has no arguments")
        else:
            added += f", {name}={value!r}"
            call.keywords.append(ast.keyword(name, ast.Constant(value)))
    for start, end, new in sorted([*splices, (last or 0, last or 0, added)], reverse=True):  # so that offsets hold
        source = source[:start] + new.encode() + source[end:]
    try:
        is_as_meant = ast.dump(ast.parse(source)) == ast.dump(module)
    except (SyntaxError, ValueError):
        is_as_meant = False
    if not is_as_meant:
        raise CannotEdit("the call is written in a way that cannot be edited automatically")
    return source


def _flag_of(module: ast.Module, value: ast.expr) -> str | None:
    """The command-line flag of ``args.value``, where this file has an ``add_argument`` for it."""
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and _name(node) == "add_argument"]
    flags = [flag.value for call in calls for flag in call.args if isinstance(flag, ast.Constant)]
    named = [flag for flag in flags if isinstance(flag, str) and flag.startswith("--")]
    wanted = value.attr if isinstance(value, ast.Attribute) else None
    return next((flag for flag in named if flag.lstrip("-").replace("-", "_") == wanted), None)


def _name(call: ast.Call) -> str:
    node = call.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
