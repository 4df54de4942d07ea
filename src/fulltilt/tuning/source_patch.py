"""The winning settings as a change of the user's source: a unified diff, applied on request, or what to write."""

from __future__ import annotations

import difflib
import hashlib
import io
import os
import shutil
import tempfile
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fulltilt.diagnosis.rules.wording import made_for_each_pass
from fulltilt.errors import MachineError, UsageError
from fulltilt.records import LoaderRecord, Settings
from fulltilt.tuning.source_call import NEED_WORKERS, ONCE_THERE_ARE_WORKERS, Refused, rewrite_call

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
MAKE_ONCE = "the loader is made anew for each epoch: made once before the loop, it could keep its workers"


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
    names = (
        "num_workers",
        "prefetch_factor",
        "pin_memory",
        "persistent_workers",
        *(["batch_size"] if with_batch else []),
    )
    wanted = {name: value for name in names if (value := getattr(in_force, name)) is not None}
    if not in_force.num_workers:
        wanted = {name: value for name, value in wanted.items() if name not in NEED_WORKERS}
    made_anew = loader is not None and made_for_each_pass(loader)
    if made_anew:
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
    result = rewrite_call(source, int(line), wanted, before, loader.given)
    if isinstance(result, Refused):
        return WriteYourself(f"{loader.where}: {result.why}", _call("DataLoader(…", news))
    new = result.source.encode(encoding)
    shuffles_anew = bool(loader.shuffle) and news.get("persistent_workers") is True
    remarks = (*result.remarks, *((OTHER_SHUFFLES,) if shuffles_anew else ()), *((MAKE_ONCE,) if made_anew else ()))
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
        raise UsageError(f"{change.path} has changed since it was studied; nothing was written", "Study it anew.")
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
