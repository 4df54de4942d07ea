"""The run folder: JSON lines appended, JSON written atomically, several ranks side by side.

    run.json              what ran, where and how it ended            (one writer: the launcher)
    rank-0.json           what rank 0 knows besides its time          (one writer: that rank)
    steps.jsonl           rank 0's spans; steps.rank-1.jsonl, …       (one writer each)
    samples.jsonl         what the machine did                        (one writer: the sampler)
    findings.json         the diagnosis                               (written at the end)
    report.html           the page                                    (written at the end)
    settings.json         what live tuning found, for --settings      (one writer: rank 0)

A line is complete when its newline is there. A kill can only tear the last line, which reading drops.
A file that is damaged anywhere else is an error that names the file and the line: nothing is guessed.
"""

from __future__ import annotations

import contextlib
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
SETTINGS_FILE = "settings.json"
# Seconds are stored with nine digits.
ROUNDING_S = 1e-8


def steps_file(rank: int) -> str:
    """The name of a rank's span file."""
    return "steps.jsonl" if rank == 0 else f"steps.rank-{rank}.jsonl"


def rank_file(rank: int) -> str:
    """The name of a rank's own record."""
    return f"rank-{rank}.json"


def claim_file(rank: int) -> str:
    """The name of the file by which a process claims a rank's two files."""
    return f".claim-{rank}"


# Everything that a run leaves in its folder. What makes it a run folder comes last: whoever is killed while moving
# them leaves a folder of which the next one still sees that there is something to move.
_RUN_FILES = (
    *("rank-*.json", "steps*.jsonl", SAMPLES_FILE, FINDINGS_FILE, REPORT_FILE, SETTINGS_FILE, ".claim-*"),
    RUN_FILE,
)


# --------------------------------------------------------------------------- records to JSON and back


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
        try:
            return float(plain)
        except OverflowError:
            raise ValueError(f"{path} is too large a number") from None
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


def set_aside(folder: Path) -> Path | None:
    """Move an earlier run in ``folder`` into a folder of its own inside it; None when there was none."""
    if not (folder / RUN_FILE).exists():
        return None
    number = 1
    while (folder / f"before-{number}").exists():
        number += 1
    aside = folder / f"before-{number}"
    try:
        aside.mkdir()
        for path in [path for pattern in _RUN_FILES for path in folder.glob(pattern)]:
            path.rename(aside / path.name)
    except OSError as error:
        raise RunFolderError(f"cannot move the earlier run in {folder} aside: {error}") from error
    return aside


def write_json(path: Path, value: Any) -> None:
    """Write a record or plain value so that ``path`` holds either the old content or the whole new one."""
    write_text(path, _to_json(value, indent=1) + "\n")


def write_text(path: Path, text: str, encoding: str = "utf-8") -> None:
    """Write ``text`` atomically: a temporary file beside it, flushed to disk, then renamed over it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # A file name that is not UTF-8 reaches us with surrogates, which UTF-8 cannot hold.
        with temporary.open("w", encoding=encoding, errors="backslashreplace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # where nothing may be written, nothing may be deleted either
            temporary.unlink()
        raise _cannot_write(path, error) from error


class LineWriter:
    """Appends one JSON object a line to a file of which it is the only writer.

    Each batch of lines goes out in one write call, so that a reader beside it sees whole lines or a torn last one.
    A batch that the disk has no room for is taken back whole, so that writing may go on once there is room again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        try:
            # Windows would turn each newline into two characters without O_BINARY.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._fd = os.open(path, flags, 0o644)
            _mend_end(self._fd, path)
        except OSError as error:
            self.close()
            raise _cannot_write(path, error) from error
        except RunFolderError:
            self.close()
            raise

    def write(self, values: Iterable[Any]) -> None:
        """Append records or plain values, one line each: all of them or, with a RunFolderError, none."""
        data = "".join(_to_json(value) + "\n" for value in values).encode()
        if not data or self._fd is None:
            return
        end = os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._take_back(end)
            raise _cannot_write(self.path, error) from error

    def close(self) -> None:
        """Close the file. Writing afterwards does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _take_back(self, end: int) -> None:
        assert self._fd is not None
        try:
            os.ftruncate(self._fd, end)
        except OSError:
            self.close()  # the next line would be glued to the torn one


def _to_json(value: Any, indent: int | None = None) -> str:
    # ASCII only: a path that is not UTF-8 comes with surrogates, which JSON can escape and UTF-8 cannot hold.
    separators = (",", ":") if indent is None else None
    return json.dumps(encode(value), allow_nan=False, indent=indent, separators=separators)


def _mend_end(fd: int, path: Path) -> None:
    """Drop the torn last line of a killed writer, which would swallow the next one.

    The file is searched from its end, so that a long one costs no more than a short one.
    """
    size = end = os.fstat(fd).st_size
    if size == 0:
        return
    if _read_at(fd, 0, 1) != b"{":
        raise RunFolderError(f"{path} exists and was not written by Fulltilt", "Choose another file with --out.")
    newline = -1
    while newline < 0 and end > 0:
        start = max(0, end - 65536)
        newline = _read_at(fd, start, end - start).rfind(b"\n")
        end = start
    whole = 0 if newline < 0 else start + newline + 1
    if whole == size:
        return
    try:
        json.loads(_read_at(fd, whole, size - whole))
    except (ValueError, RecursionError):
        os.ftruncate(fd, whole)
    else:
        os.write(fd, b"\n")  # only the newline was missing


def _read_at(fd: int, start: int, length: int) -> bytes:
    os.lseek(fd, start, os.SEEK_SET)  # appending is not disturbed: O_APPEND writes at the end wherever we read
    return os.read(fd, length)


def _cannot_write(path: Path, error: OSError) -> RunFolderError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Free some space or choose another folder with --out." if full else None
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
    except (ValueError, RecursionError) as error:  # ValueError alone: a number with too many digits
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


def read_new_lines(path: Path, record: type[Record], offset: int) -> tuple[list[Record], int]:
    """The complete lines behind a byte offset, and the offset behind them: for following a file that grows."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror or error}") from error
    complete = data[: data.rfind(b"\n") + 1]
    try:
        return [decode(record, json.loads(line)) for line in complete.splitlines()], offset + len(complete)
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path}, behind byte {offset}: damaged ({error})") from error


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
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError as error:
        raise RunFolderError(f"{folder} is not a run folder: there is no such folder") from error
    except NotADirectoryError as error:
        raise RunFolderError(f"{folder} is not a run folder: it is a file") from error
    except OSError as error:
        raise RunFolderError(f"cannot read {folder}: {error.strerror or error}") from error
    if RUN_FILE not in names:
        raise RunFolderError(f"{folder} is not a run folder: it has no {RUN_FILE}")
    run = read_record(folder / RUN_FILE, RunRecord)
    numbers = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"rank-(0|[1-9][0-9]*)\.json", name)))
    known = {steps_file(n) for n in numbers}
    orphans = [name for name in names if re.fullmatch(r"steps(\.rank-[0-9]+)?\.jsonl", name) and name not in known]
    ranks = tuple(read_record(folder / rank_file(n), RankRecord) for n in numbers)
    return Run(
        folder=str(folder),
        run=run,
        ranks=ranks,
        spans=tuple(
            _to_the_end(rank, tuple(read_lines(folder / steps_file(n), Span)))
            for n, rank in zip(numbers, ranks, strict=True)
        ),
        samples=tuple(read_lines(folder / SAMPLES_FILE, Sample)),
        warnings=tuple(f"{name} is left out: its rank's own record is not there" for name in orphans),
    )


def _to_the_end(rank: RankRecord, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The spans of a rank with what it was at when it was last heard of, unless it has stepped since."""
    last = rank.under_way
    if rank.finished or last is None or not spans or last.t0_s < spans[-1].t1_s - ROUNDING_S:
        return spans
    return (*spans, last)
