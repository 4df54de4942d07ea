"""The winning settings as a change of the user's source: a unified diff, applied on request, or what to write.

The text is changed where the DataLoader call of the training loader stands, and only where its argument is a literal
with the value that was seen in force, or is not there. Everything else is told to the user instead.
"""

from __future__ import annotations

import ast
import copy
import difflib
import hashlib
import io
import os
import re
import shutil
import tempfile
import tokenize
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fulltilt.diagnosis.findings import made_for_each_pass
from fulltilt.errors import MachineError, UsageError
from fulltilt.records import LoaderRecord, Settings
from fulltilt.tuning.space import LOADER_SETTINGS

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
# The order of DataLoader's positional arguments.
POSITIONS = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context"),
)
# Libraries that construct the loader themselves, and how they are told.
_TRAINING_ARGUMENTS = {
    "num_workers": "dataloader_num_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "pin_memory": "dataloader_pin_memory",
    "persistent_workers": "dataloader_persistent_workers",
    "batch_size": "per_device_train_batch_size",
}


@dataclass(frozen=True, slots=True)
class SourceChange:
    """A change of one file. ``old`` and ``new`` are its whole text, byte for byte; the diff is in its ``encoding``."""

    path: Path
    old: bytes
    new: bytes
    diff: str
    encoding: str
    remarks: tuple[str, ...]


# torch draws a seed whenever workers start, from the generator that shuffles too.
OTHER_SHUFFLES = (
    "workers that persist are seeded once, so that shuffles from the second epoch on come in another order than before"
)
SEVERAL_LOADERS = "this line makes other loaders too, which change with it"
MAKE_ONCE = "the loader is made again for each epoch: made once before the loop, it could keep its workers"


@dataclass(frozen=True, slots=True)
class WriteYourself:
    """Why there is no diff, and what to write instead."""

    why: str
    write: str


def propose(
    loader: LoaderRecord | None,
    in_force: Settings,
    working_folder: Path,
    command: tuple[str, ...] = (),
    with_batch: bool = False,
) -> SourceChange | WriteYourself:
    """The change that puts the loader's part of ``in_force`` into the user's source."""
    names = (*LOADER_SETTINGS, *(["batch_size"] if with_batch else []))
    wanted = {name: value for name in names if (value := getattr(in_force, name)) is not None}
    if not in_force.num_workers:
        wanted = {name: value for name, value in wanted.items() if name not in NEED_WORKERS}
    made_again = loader is not None and made_for_each_pass(loader)
    if made_again:
        wanted.pop("persistent_workers", None)  # workers live no longer than their loader
    if loader is not None and loader.made_by == "fulltilt":
        return WriteYourself(
            "Fulltilt makes the loader from its settings", " ".join(_train_flags(in_force, with_batch))
        )
    if loader is None or loader.where is None:
        return WriteYourself("it was not seen where the training loader is made", _call("DataLoader(…", wanted))
    before = {name: getattr(loader, name) for name in names}
    news = {name: value for name, value in wanted.items() if _is_news(name, before[name], value)}
    if loader.made_by == "transformers":
        arguments = {_TRAINING_ARGUMENTS[name]: value for name, value in news.items()}
        return WriteYourself(
            f"Hugging Face's Trainer makes the loader ({loader.where})", _call("TrainingArguments(…", arguments)
        )
    if loader.made_by is not None:
        return WriteYourself(f"{loader.made_by} makes the loader ({loader.where})", _call("DataLoader(…", news))
    for argument in command:
        name = argument.split("=")[0].lstrip("-").replace("-", "_")
        if argument.startswith("--") and name in wanted and wanted[name] != before[name]:
            return WriteYourself(
                f"{argument.split('=')[0]} is given on the command line", f"{argument.split('=')[0]} {wanted[name]}"
            )
    file, _, line = loader.where.rpartition(":")
    path = source_file(loader.where, working_folder, command)
    try:
        old = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(old).readline)
        source = old.decode(encoding)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        return WriteYourself(f"{file} could not be read: {error}", _call("DataLoader(…", news))
    try:
        edited, several = edit_call(source, int(line), wanted, before, loader.given)
    except Unclear as unclear:
        return WriteYourself(f"{loader.where}: {unclear}", _call("DataLoader(…", news))
    new = edited.encode(encoding)
    shuffles_otherwise = bool(loader.shuffle) and news.get("persistent_workers") is True
    remarks = (
        *((SEVERAL_LOADERS,) if several else ()),
        *((OTHER_SHUFFLES,) if shuffles_otherwise else ()),
        *((MAKE_ONCE,) if made_again else ()),
    )
    # A mark at the beginning of the file is part of its first line to patch and git.
    encoding = "utf-8" if encoding == "utf-8-sig" else encoding
    diff = unified_diff(file, old.decode(encoding), new.decode(encoding))
    return SourceChange(path, old, new, diff, encoding, remarks)


def _is_news(name: str, before: object, value: object) -> bool:
    """Whether a setting is to be written: it is not in force, nor comes by itself with workers."""
    return value != before and not (before is None and value == ONCE_THERE_ARE_WORKERS.get(name))


def _train_flags(settings: Settings, with_batch: bool) -> list[str]:
    """Settings as flags of `fulltilt train`."""
    flags = [] if settings.num_workers is None else ["--workers", str(settings.num_workers)]
    if with_batch and settings.batch_size is not None:
        flags += ["--batch-size", str(settings.batch_size)]
    return flags


def unified_diff(name: str, old: str, new: str) -> str:
    """A diff that `git apply` and `patch -p1` take."""
    # Not splitlines: a form feed is no line end to git and patch.
    before, after = (io.StringIO(text, newline="").readlines() for text in (old, new))
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def source_file(where: str, working_folder: Path, command: Sequence[str]) -> Path:
    """The file of a place as records name it: relative to the working folder, or else to that of a script elsewhere."""
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
    """Write the change, whole or not at all. Raises UsageError when the file is not the one that was studied."""
    if fingerprint(change.path) != hashlib.sha256(change.old).hexdigest() or (
        studied_sha256 is not None and studied_sha256 != hashlib.sha256(change.old).hexdigest()
    ):
        raise UsageError(f"{change.path} has changed since it was studied; nothing was written", "Tune it again.")
    path = change.path.resolve()  # a link stays one
    if not os.access(path, os.W_OK):
        raise MachineError(
            f"cannot write {change.path}: it is read-only", "Make it writable, or apply the diff yourself."
        )
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise MachineError(f"cannot write into {path.parent}: {error.strerror or error}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(change.new)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, temporary)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise MachineError(f"cannot write {change.path}: {error.strerror or error}") from error


def _call(opening: str, arguments: Mapping[str, object]) -> str:
    return f"{opening}, {', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


# --------------------------------------------------------------------------- the call


class Unclear(Exception):  # noqa: N818 - reads as the sentence it is
    """Why a call cannot be changed."""


def edit_call(
    source: str, line: int, wanted: Mapping[str, object], in_force: Mapping[str, object], given: Collection[str] = ()
) -> tuple[str, bool]:
    """The source with ``wanted`` in the DataLoader call at ``line``, and whether that call makes several loaders.

    ``in_force`` is what the call ran with before, ``given`` the arguments that it was seen with. Raises Unclear.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise Unclear(f"the file does not parse: {error}") from error
    call = _loader_call(module, line, given)
    text = _Text(source)
    added: dict[str, object] = {}
    for name, value in wanted.items():
        if value == in_force.get(name, DEFAULTS.get(name)):
            continue
        written = _written(call, name)
        if written is None and name in given:
            raise Unclear(f"{name} is given to DataLoader(...) in a way that is not followed")
        # Where the number of workers varies, torch would refuse what needs some.
        for which in (name, "num_workers") if name in NEED_WORKERS else (name,):
            expression = _written(call, which)
            if expression is not None and not isinstance(expression, ast.Constant):
                raise Unclear(f"{which} is {ast.unparse(expression)} there, not a number or a word")
        assert written is None or isinstance(written, ast.Constant)
        now = DEFAULTS.get(name) if written is None else written.value
        if now == value:  # written since
            continue
        if now != in_force.get(name, DEFAULTS.get(name)) and not (now is None and name in ONCE_THERE_ARE_WORKERS):
            raise Unclear(f"{name} is {now!r} there, but {in_force.get(name)!r} was in force")
        if value == ONCE_THERE_ARE_WORKERS.get(name, ...) and (written is None or written.value is None):
            continue
        if written is None:
            added[name] = value
        else:
            text.replace(text.start(written), text.end(written), repr(value))
    if added:
        _add_keywords(text, call, added)
    edited = text.edited()
    if not _is_the_same_but_for(module, edited, call, wanted):
        raise Unclear("the call is written in a way that is not changed by machine")
    return edited, _makes_several(module, call)


def _loader_call(module: ast.Module, line: int, given: Collection[str]) -> ast.Call:
    """The call that makes the loader at a line. Raises Unclear."""
    names = {"DataLoader"} | {
        alias.asname
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == "DataLoader" and alias.asname
    }
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    around = [call for call in calls if call.lineno <= line <= (call.end_lineno or 0)]
    found = [call for call in around if _last_name(call.func).endswith("DataLoader") or _last_name(call.func) in names]
    found = [call for call in found if call.lineno == max(each.lineno for each in found)]
    if len(found) > 1:
        found = [call for call in found if set(_names(call)) == set(given)]
    if not found:
        raise Unclear(f"no single DataLoader(...) call stands at line {line}")
    if len(found) > 1:
        raise Unclear(f"several loaders are made at line {line}")
    return found[0]


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _names(call: ast.Call) -> Iterator[str]:
    """The arguments that are written in a call."""
    yield from POSITIONS[: len(call.args)]
    yield from (keyword.arg for keyword in call.keywords if keyword.arg is not None)


def _written(call: ast.Call, name: str) -> ast.expr | None:
    """What stands for an argument in a call, by its keyword or its position. Raises Unclear behind a ``*``."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        raise Unclear("its arguments are unpacked with *")
    index = POSITIONS.index(name) if name in POSITIONS else len(call.args)
    return call.args[index] if index < len(call.args) else None


class _Text:
    """A source text with replacements, in the bytes that `ast` counts."""

    def __init__(self, source: str) -> None:
        self.data = source.encode()
        lines = self.data.splitlines(keepends=True)
        self._begins = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
        self._replacements: list[tuple[int, int, bytes]] = []

    def start(self, node: ast.expr | ast.keyword) -> int:
        return self._begins[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.keyword) -> int:
        return self._begins[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    def line_start(self, offset: int) -> int:
        return max(begin for begin in self._begins if begin <= offset)

    def replace(self, start: int, end: int, text: str) -> None:
        self._replacements.append((start, end, text.encode()))

    def edited(self) -> str:
        data = self.data
        for start, end, text in sorted(self._replacements, reverse=True):
            data = data[:start] + text + data[end:]
        return data.decode()


def _add_keywords(text: _Text, call: ast.Call, added: Mapping[str, object]) -> None:
    """Behind the last argument, on lines of their own where the arguments stand so."""
    words = [f"{name}={value!r}" for name, value in added.items()]
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    if not arguments:
        raise Unclear("the call has no arguments")
    last = max(arguments, key=text.end)
    end, begin = text.end(last), text.line_start(text.start(last))
    indent = text.data[begin : text.start(last)]
    rest = re.match(rb"[ \t]*(,?)[ \t]*(?:#[^\r\n]*)?(\r\n|\r|\n)", text.data[end:])
    if indent.strip() or rest is None:
        text.replace(end, end, "".join(f", {word}" for word in words))
        return
    newline = rest[2].decode()
    if not rest[1]:
        text.replace(end, end, ",")
    comma = [*("," for _ in words[1:]), rest[1].decode()]
    lines = (f"{indent.decode()}{word}{sign}{newline}" for word, sign in zip(words, comma, strict=True))
    text.replace(end + rest.end(), end + rest.end(), "".join(lines))


def _is_the_same_but_for(module: ast.Module, edited: str, call: ast.Call, wanted: Mapping[str, object]) -> bool:
    """Whether the edited source differs from the module in these arguments of this call only."""

    def without(tree: ast.Module) -> str:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (call.lineno, call.col_offset):
                node.keywords = [keyword for keyword in node.keywords if keyword.arg not in wanted]
                for index, name in enumerate(POSITIONS[: len(node.args)]):
                    if name in wanted:
                        node.args[index] = ast.Constant(None)
        return ast.dump(tree)

    try:
        changed = ast.parse(edited)
    except (SyntaxError, ValueError):
        return False
    return without(changed) == without(copy.deepcopy(module))


def _makes_several(module: ast.Module, call: ast.Call) -> bool:
    """Whether the call stands in a function that is called more than once."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and call in ast.walk(node):
            calls = [each for each in ast.walk(module) if isinstance(each, ast.Call)]
            if sum(_last_name(each.func) == node.name for each in calls) > 1:
                return True
    return False
