"""The run folder: JSON lines appended, JSON written atomically, several ranks side by side.

    run.json              what ran, where and how it ended            (one writer: the launcher)
    rank-0.json           what rank 0 knows besides its time          (one writer: that rank)
    steps.jsonl           rank 0's spans; steps.rank-1.jsonl, …       (one writer each)
    samples.jsonl         what the machine did                        (one writer: the sampler)
    findings.json         the diagnosis                               (written at the end)
    report.html           the page                                    (written at the end)

A line is complete when its newline is there. A kill can only tear the last line, which reading drops.
A file that is damaged anywhere else is an error that names the file and the line: nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import math
import os
import re
import tempfile
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fulltilt.errors import RunFolderError
from fulltilt.records import SCHEMA_VERSION, RankRecord, Run, RunRecord, Sample, Span

Record = TypeVar("Record")

RUN_FILE = "run.json"
SAMPLES_FILE = "samples.jsonl"
FINDINGS_FILE = "findings.json"
REPORT_FILE = "report.html"


def steps_file(rank: int) -> str:
    """The name of a rank's span file."""
    return "steps.jsonl" if rank == 0 else f"steps.rank-{rank}.jsonl"


def rank_file(rank: int) -> str:
    """The name of a rank's own record."""
    return f"rank-{rank}.json"


# --------------------------------------------------------------------------- records to JSON and back


def encode(value: Any) -> Any:
    """A record as plain JSON values. Fields at their default are left out, so that lines stay short."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if field.default is not dataclasses.MISSING and item == field.default:
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
    """The record that ``plain`` describes. Unknown keys are ignored; raises ValueError for anything else odd."""
    return typing.cast(Record, _decode_as(record, plain, record.__name__))


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
            if field.name in plain:
                values[field.name] = _decode_as(kinds[field.name], plain[field.name], f"{path}.{field.name}")
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
    if expected is float and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    if isinstance(plain, expected) and not (expected is int and isinstance(plain, bool)):
        return plain
    raise ValueError(f"{path} should be {expected.__name__}, not {plain!r}")


def _decode_union(options: tuple[Any, ...], plain: Any, path: str) -> Any:
    if plain is None:
        if types.NoneType in options:
            return None
        raise ValueError(f"{path} should not be null")
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


# --------------------------------------------------------------------------- writing


def create_folder(folder: Path) -> Path:
    """Make ``folder`` and check that files can be written into it. Raises RunFolderError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunFolderError(
            f"cannot write into {folder}: {error.strerror or error}", "Choose another folder with --out."
        ) from error
    return folder


def write_json(path: Path, value: Any) -> None:
    """Write a record or plain value so that ``path`` holds either the old content or the whole new one."""
    write_text(path, json.dumps(encode(value), ensure_ascii=False, allow_nan=False, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` atomically: a temporary file beside it, flushed to disk, then renamed over it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


class LineWriter:
    """Appends one JSON object a line to a file of which it is the only writer.

    Each batch of lines goes out in one write call, so that a reader beside it sees whole lines or a torn last one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # A torn line of a killed predecessor must not swallow our first one.
            torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
            self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            if torn:
                _truncate_torn_line(path)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def write(self, values: Iterable[Any]) -> None:
        """Append records or plain values, one line each."""
        lines = (json.dumps(encode(v), ensure_ascii=False, allow_nan=False, separators=(",", ":")) for v in values)
        data = "".join(line + "\n" for line in lines).encode()
        if not data or self._fd is None:
            return
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def close(self) -> None:
        """Close the file. Writing afterwards does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _truncate_torn_line(path: Path) -> None:
    data = path.read_bytes()
    os.truncate(path, data.rfind(b"\n") + 1)


def _cannot_write(path: Path, error: OSError) -> RunFolderError:
    remedy = "Free some space or choose another folder with --out." if error.errno == errno.ENOSPC else None
    return RunFolderError(f"cannot write {path}: {error.strerror or error}", remedy)


# --------------------------------------------------------------------------- reading


def read_json(path: Path) -> Any:
    """The plain content of a JSON file. Raises RunFolderError naming the file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RunFolderError(f"{path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise RunFolderError(f"{path}, line {line}: damaged JSON ({error})") from error


def read_record(path: Path, record: type[Record]) -> Record:
    """A record from its JSON file. Raises RunFolderError naming the file."""
    plain = read_json(path)
    _check_schema(path, plain)
    try:
        return decode(record, plain)
    except ValueError as error:
        raise RunFolderError(f"{path}: {error}") from error


def read_lines(path: Path, record: type[Record]) -> Iterator[Record]:
    """The records of a JSON-lines file. A torn last line is dropped; any other damage raises RunFolderError."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    return  # torn by a kill; it was never complete
                try:
                    yield decode(record, json.loads(raw))
                except (ValueError, RecursionError) as error:
                    raise RunFolderError(f"{path}, line {number}: damaged ({error})") from error
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror or error}") from error


def _check_schema(path: Path, plain: Any) -> None:
    found = plain.get("schema_version", SCHEMA_VERSION) if isinstance(plain, dict) else SCHEMA_VERSION
    if not isinstance(found, int) or isinstance(found, bool):
        raise RunFolderError(f"{path}: schema_version should be a number, not {found!r}")
    if found > SCHEMA_VERSION:
        raise RunFolderError(
            f"{path} was written by a newer Fulltilt (schema {found}; this one reads up to {SCHEMA_VERSION})",
            "Update with: pip install --upgrade fulltilt",
        )


def load(folder: str | Path) -> Run:
    """Read a run folder, of a finished, running or killed job. Raises RunFolderError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a run folder: there is no such folder")
    if not (folder / RUN_FILE).exists():
        raise RunFolderError(f"{folder} is not a run folder: it has no {RUN_FILE}")
    run = read_record(folder / RUN_FILE, RunRecord)
    numbers = sorted(
        int(match[1]) for path in folder.iterdir() if (match := re.fullmatch(r"rank-(\d+)\.json", path.name))
    )
    ranks = tuple(read_record(folder / rank_file(n), RankRecord) for n in numbers)
    spans = tuple(tuple(read_lines(folder / steps_file(n), Span)) for n in numbers)
    samples = tuple(read_lines(folder / SAMPLES_FILE, Sample))
    return Run(str(folder), run, ranks, spans, samples)
