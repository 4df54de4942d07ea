"""Reading a run folder, of a finished, running or killed job: damage is named by file and line, nothing is guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from fulltilt.errors import NotARunFolder, RunFolderError
from fulltilt.records import SCHEMA_VERSION, RankRecord, Run, RunRecord, Sample, Span
from fulltilt.store.codec import decode
from fulltilt.store.names import RUN_FILE, SAMPLES_FILE, rank_file, steps_file

Record = TypeVar("Record")
# Seconds are stored with nine digits.
ROUNDING_S = 1e-8


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
        raise NotARunFolder(f"{folder} is not a run folder: there is no such folder") from error
    except NotADirectoryError as error:
        raise NotARunFolder(f"{folder} is not a run folder: it is a file") from error
    except OSError as error:
        raise RunFolderError(f"cannot read {folder}: {error.strerror or error}") from error
    if RUN_FILE not in names:
        raise NotARunFolder(f"{folder} is not a run folder: it has no {RUN_FILE}")
    run = read_record(folder / RUN_FILE, RunRecord)
    ranks = read_ranks(folder)
    known = {steps_file(number) for number in ranks}
    orphans = [name for name in names if re.fullmatch(r"steps(\.rank-[0-9]+)?\.jsonl", name) and name not in known]
    return Run(
        folder=str(folder),
        run=run,
        ranks=tuple(ranks.values()),
        spans=tuple(
            _to_the_end(rank, tuple(read_lines(folder / steps_file(number), Span))) for number, rank in ranks.items()
        ),
        samples=tuple(read_lines(folder / SAMPLES_FILE, Sample)),
        warnings=tuple(f"{name} is left out: its rank's own record is not there" for name in orphans),
    )


def read_ranks(folder: Path) -> dict[int, RankRecord]:
    """The record of each rank that has written one, by its number."""
    found = (re.fullmatch(r"rank-(0|[1-9][0-9]*)\.json", path.name) for path in folder.iterdir())
    numbers = sorted(int(match[1]) for match in found if match)
    return {number: read_record(folder / rank_file(number), RankRecord) for number in numbers}


def _to_the_end(rank: RankRecord, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The spans of a rank with what it was at when it was last heard of, unless it has stepped since."""
    last = rank.under_way
    if rank.finished or last is None or not spans or last.t0_s < spans[-1].t1_s - ROUNDING_S:
        return spans
    return (*spans, last)
