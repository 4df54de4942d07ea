"""Create a run folder, move an earlier run away, and read and write its files.

Errors name the damaged file and line, and say when the disk is full.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import re
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fulltilt.errors import ForeignFiles, NotARunFolder, RunFolderError, UsageError
from fulltilt.records import SCHEMA_VERSION, RankRecord, Run, RunRecord, Sample, Span
from fulltilt.store.owned_folder import MARKER, NO_FOLLOW, OwnedFolder, kind_of, open_plain, write_named_file
from fulltilt.store.record_json import decode, encode

Record = TypeVar("Record")

# --------------------------------------------------------------------------- names

RUN_FILE = "run.json"
SAMPLES_FILE = "samples.jsonl"
FINDINGS_FILE = "findings.json"
REPORT_FILE = "report.html"
SETTINGS_FILE = "settings.json"
LIVE = "live"  # what the ranks report to each other under live tuning: live.GROUP.rank-3.jsonl


def steps_file(rank: int, part: int = 0) -> str:
    """The name of a rank's span file. In the folder of a task each process of the rank has a part of its own."""
    if part:
        return f"steps.rank-{rank}.{part}.jsonl"
    return "steps.jsonl" if rank == 0 else f"steps.rank-{rank}.jsonl"


def rank_file(rank: int, part: int = 0) -> str:
    """The name of a rank's own record."""
    return f"rank-{rank}.{part}.json" if part else f"rank-{rank}.json"


def claim_file(rank: int, part: int = 0) -> str:
    """The name of the file with which a process claims a rank's two files."""
    return f".claim-{rank}.{part}" if part else f".claim-{rank}"


# All files of a run. The one that makes it a run folder is last: if moving them is interrupted, the next job still sees
# that there is something to move.
RUN_FILES = (
    *("rank-*.json", "steps*.jsonl", f"{LIVE}.*.jsonl", SAMPLES_FILE, FINDINGS_FILE, REPORT_FILE, SETTINGS_FILE),
    ".claim-*",
    RUN_FILE,
)


# --------------------------------------------------------------------------- reading

# Seconds are stored with nine digits.
ROUNDING_S = 1e-8


def read_json(path: Path, *, follow: bool = False) -> Any:
    """The content of a JSON file; ``follow`` a link only if the user named it. Raises RunFolderError."""
    try:
        with open_plain(path, follow=follow) as file:
            return parse_json(file.read().decode("utf-8"))
    except FileNotFoundError as error:
        raise RunFolderError(f"{path} does not exist") from error
    except OSError as error:
        raise _cannot("read", path, error) from error
    except (ValueError, RecursionError) as error:  # also invalid UTF-8, or a number with too many digits
        line = getattr(error, "lineno", 1)
        raise RunFolderError(f"{path}, line {line}: damaged JSON ({error})") from error


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError also for a repeated key, of which one value would be lost."""

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            key = next(key for number, key in enumerate(keys) if key in keys[:number])
            again = list(re.finditer(rf"{re.escape(json.dumps(key, ensure_ascii=False))}\s*:", text))
            raise json.JSONDecodeError(f"the key {key!r} stands twice", text, again[-1].start() if again else 0)
        return made

    return json.loads(text, object_pairs_hook=mapping)


def read_record(path: Path, record: type[Record]) -> Record:
    """A record from its JSON file. Raises RunFolderError naming the file."""
    plain = read_json(path)
    _check_schema(path, plain)
    try:
        return decode(record, plain)
    except ValueError as error:
        raise RunFolderError(f"{path}: {error}") from error


def read_lines(path: Path, record: type[Record], every: int = 1) -> Iterator[Record]:
    """The records of a JSON-lines file, or every n-th; a torn last line is dropped. Raises RunFolderError."""
    for number, line in enumerate(_whole_lines(path), start=1):
        if number % every == 0:
            yield _decoded(record, line, path, f"line {number}")


def read_new_lines(path: Path, record: type[Record], offset: int) -> tuple[list[Record], int]:
    """The complete lines after a byte offset, and the offset after them, to follow a growing file."""
    lines = list(_whole_lines(path, offset))
    return [_decoded(record, line, path, f"after byte {offset}") for line in lines], offset + sum(map(len, lines))


def _whole_lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    try:
        with open_plain(path) as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # torn by a kill, or still being written
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot("read", path, error) from error


def _decoded(record: type[Record], line: bytes, path: Path, place: str) -> Record:
    try:
        return decode(record, json.loads(line))
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path}, {place}: damaged ({error})") from error


def _check_schema(path: Path, plain: Any) -> None:
    found = plain.get("schema_version", SCHEMA_VERSION) if isinstance(plain, dict) else SCHEMA_VERSION
    if not isinstance(found, int) or isinstance(found, bool):
        raise RunFolderError(f"{path}: schema_version should be a number, not {found!r}")
    if found > SCHEMA_VERSION:
        raise RunFolderError(
            f"{path} was written by a newer Fulltilt (schema {found}; this one reads up to {SCHEMA_VERSION})",
            "Update with: pip install --upgrade fulltilt",
        )


def load_run(folder: Path) -> Run:
    """Read the folder of a single run, of a finished, running or killed job. Raises RunFolderError."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError as error:
        raise NotARunFolder(f"{folder} is not a run folder: there is no such folder", _runs_nearby(Path())) from error
    except NotADirectoryError as error:
        script = f"To run and record a script: fulltilt run {folder}" if folder.suffix == ".py" else None
        raise NotARunFolder(f"{folder} is not a run folder: it is a file", script) from error
    except OSError as error:
        raise _cannot("read", folder, error) from error
    if RUN_FILE not in names:
        raise NotARunFolder(f"{folder} is not a run folder: it has no {RUN_FILE}", _runs_nearby(folder))
    run = read_record(folder / RUN_FILE, RunRecord)
    ranks = read_ranks(folder)
    known = {steps_file(number) for number in ranks}
    orphans = [name for name in names if re.fullmatch(r"steps(\.rank-[0-9]+)?\.jsonl", name) and name not in known]
    return Run(
        folder=str(folder),
        run=run,
        ranks=tuple(ranks.values()),
        spans=tuple(
            to_the_end(rank, tuple(read_lines(folder / steps_file(number), Span))) for number, rank in ranks.items()
        ),
        samples=tuple(read_lines(folder / SAMPLES_FILE, Sample)),
        warnings=tuple(f"{name} was not read: the record of its rank is missing" for name in orphans),
    )


def _runs_nearby(folder: Path) -> str:
    """A hint: the newest runs nearby, or how to make one."""
    found = {file.parent for pattern in ("*", "*/*") for file in folder.glob(f"{pattern}/{RUN_FILE}")}
    newest = sorted(found, key=lambda run: (run / RUN_FILE).stat().st_mtime, reverse=True)[:3]
    if not newest:
        return "fulltilt run SCRIPT.py records one, in fulltilt-runs."
    return f"There are runs in {', '.join(map(str, newest))}{' and others' if len(found) > len(newest) else ''}."


def is_task(folder: Path) -> bool:
    """Whether this is the run folder of one task of several."""
    try:
        return read_record(folder / RUN_FILE, RunRecord).task is not None
    except RunFolderError:
        return False


def rank_parts(folder: Path) -> list[tuple[int, int]]:
    """Each rank and part with a record, in order."""
    pattern = r"rank-(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?\.json"
    found = (re.fullmatch(pattern, path.name) for path in folder.iterdir())
    return sorted((int(match[1]), int(match[2] or 0)) for match in found if match)


def read_ranks(folder: Path) -> dict[int, RankRecord]:
    """The last record of each rank that has written one, by its number."""
    return {rank: read_record(folder / rank_file(rank, part), RankRecord) for rank, part in rank_parts(folder)}


def to_the_end(rank: RankRecord, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The spans of a rank, and the time since its last step if it did not finish."""
    last = rank.under_way
    if rank.finished or last is None or not spans or last.t0_s < spans[-1].t1_s - ROUNDING_S:
        return spans
    return (*spans, last)


# --------------------------------------------------------------------------- writing

RUN = "run folder"
TRAINING = "training"
PRIVATE = 0o600
_APPENDING = os.O_RDWR | os.O_APPEND | NO_FOLLOW


def create_folder(folder: Path, reserved: Iterable[str] = ()) -> Path:
    """Create or take over a folder for a run or a training. Raises ForeignFiles, UsageError or MachineError.

    Existing files of a run, and the ``reserved`` names, have to be ours.
    """
    owned = OwnedFolder.claim(folder, TRAINING if kind_of(folder) == TRAINING else RUN)
    found = (*_run_files(folder), *(folder / name for name in reserved if os.path.lexists(folder / name)))
    if in_the_way := [path.name for path in found if not owned.owns(path)]:
        raise ForeignFiles(
            f"{folder} holds files that Fulltilt did not write: {', '.join(in_the_way)}",
            "Move them elsewhere, or choose another folder with --out.",
        )
    return folder


def create_task_folder(folder: Path, name: str) -> Path:
    """A new folder ``name`` (or ``name.2``, …) in the folder of a job, for one task. Raises as ``create_folder`` does.

    Other tasks do the same at the same time, maybe on other machines. No lock is needed: on every file system only one
    process can create a folder.
    """
    return create_new_folder(create_folder(folder) / name, ".")


def create_new_folder(folder: Path, before_number: str = "-") -> Path:
    """A new folder for a run: ``folder``, or where that exists ``folder-2``, …; raises as ``create_folder`` does."""
    made, number = folder, 1
    while True:
        try:
            made.mkdir(parents=True)
            return create_folder(made)
        except FileExistsError:
            number += 1
            made = folder.with_name(f"{folder.name}{before_number}{number}")
        except OSError as error:
            raise _cannot("write", made, error) from error


def move_earlier_run(folder: Path) -> Path | None:
    """Move an earlier run in ``folder`` into a new folder inside it; None when there was none."""
    owned = OwnedFolder(folder)
    if not owned.owns(RUN_FILE):
        return None
    _refuse_run_elsewhere(folder)
    names = (f"before-{number}" for number in itertools.count(1))
    earlier = next(name for name in names if not os.path.lexists(folder / name))
    try:
        owned.make(earlier)
        for path in _run_files(folder):
            owned.move(path.name, f"{earlier}/{path.name}")
    except OSError as error:
        raise RunFolderError(f"cannot move the earlier run in {folder} to {earlier}: {error}") from error
    return folder / earlier


# A recording appends a sample every second.
_ALIVE_S = 10.0


def _refuse_run_elsewhere(folder: Path) -> None:
    """Raises UsageError where another machine records into this folder now, which file locks may not show.

    Both times are from the clock of the file system.
    """
    try:
        earlier = read_record(folder / RUN_FILE, RunRecord)
        os.utime(folder / MARKER)
        now_s, last_s = ((folder / name).stat().st_mtime for name in (MARKER, SAMPLES_FILE))
    except (RunFolderError, OSError):
        return
    host = earlier.machine.hostname
    if earlier.state == "running" and host != socket.gethostname() and now_s - last_s < _ALIVE_S:
        raise UsageError(f"{host} is recording a run into {folder}", "Wait for it, or choose another folder.")


def _run_files(folder: Path) -> list[Path]:
    return [path for pattern in RUN_FILES for path in folder.glob(pattern)]


def write_json(path: Path, value: Any, again: bool = False) -> None:
    """Write a record or plain value so that ``path`` holds either the old content or the whole new one.

    A file that is written ``again`` and again has one line, which takes a tenth of the time and of the GIL.
    """
    write_text(path, _to_json(value, indent=None if again else 1) + "\n", again=again)


def write_text(path: Path, text: str, again: bool = False, signature: bytes | None = None) -> None:
    """Write ``text`` whole, readable by its owner only, since it may hold a command line. Raises ForeignFiles.

    A file that is written ``again`` and again takes one line of the folder's marker. Outside of Fulltilt's own folders
    an existing file is replaced only if it has the ``signature``.
    """
    # A file name that is not UTF-8 comes with surrogates, which UTF-8 cannot encode.
    data = text.encode(errors="backslashreplace")
    try:
        if (owned := OwnedFolder.around(path)) is not None:
            owned.write(path, data, PRIVATE, again)
        else:
            write_named_file(path, data, PRIVATE, signature)
    except OSError as error:
        raise _cannot("write", path, error) from error


class LineWriter:
    """Appends one JSON object per line to a file that has no other writer.

    Lines are written in one call, so that a reader sees whole lines or a torn last one. If the disk is full all of them
    are removed again, so that writing may go on later. The file is open only while it is written: a script that closes
    all descriptors, as daemons do, may reuse the number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._absolute = Path(os.path.abspath(path))  # noqa: PTH100 - the job may change folders; no link is followed
        self._closed = False
        try:
            self._owner = OwnedFolder.around(path)
            if self._owner is not None:
                os.close(self._owner.append(self._absolute, PRIVATE))
            with _opened(path, os.O_CREAT) as fd:
                self._inode = os.fstat(fd).st_ino
                _mend_end(fd, path)
        except OSError as error:
            raise _cannot("write", path, error) from error

    def write(self, values: Iterable[Any]) -> None:
        """Append records or plain values, one line each: all of them or, with a RunFolderError, none."""
        data = "".join(_to_json(value) + "\n" for value in values).encode()
        if not data or self._closed:
            return
        try:
            with _opened(self._absolute) as fd:
                if os.fstat(fd).st_ino != self._inode:
                    raise OSError("another file has replaced it")
                self._append(fd, data)
        except OSError as error:
            raise _cannot("write", self.path, error) from error

    def _append(self, fd: int, data: bytes) -> None:
        end = os.fstat(fd).st_size
        try:
            while data:
                data = data[os.write(fd, data) :]
        except OSError:
            os.ftruncate(fd, end)
            raise

    def close(self) -> None:
        """End writing; later calls of ``write`` do nothing."""
        self._closed = True
        with contextlib.suppress(OSError):  # a full disk: the marker knows the file by its inode
            if self._owner is not None and self._owner.owns(self._absolute):
                self._owner.record(self._absolute)


@contextlib.contextmanager
def _opened(path: Path, more: int = 0) -> Iterator[int]:
    fd = os.open(path, _APPENDING | more, PRIVATE)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        yield fd
    finally:
        os.close(fd)


def _to_json(value: Any, indent: int | None = None) -> str:
    # ASCII only: a path that is not UTF-8 comes with surrogates, which JSON can escape and UTF-8 cannot encode.
    separators = (",", ":") if indent is None else None
    return json.dumps(encode(value), allow_nan=False, indent=indent, separators=separators)


def _mend_end(fd: int, path: Path) -> None:
    """Drop the torn last line of a killed writer, which would merge with the next one."""
    size = os.fstat(fd).st_size
    if size == 0:
        return
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as data:  # reads only the end of a long file
        if data[:1] != b"{":
            raise RunFolderError(f"{path} exists and was not written by Fulltilt", "Choose another file with --out.")
        whole = data.rfind(b"\n") + 1
        torn = data[whole:]
    if not torn:
        return
    try:
        json.loads(torn)
    except (ValueError, RecursionError):
        os.ftruncate(fd, whole)
    else:
        os.write(fd, b"\n")  # only the newline was missing


def _cannot(do: str, path: Path, error: OSError) -> RunFolderError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Free some space or choose another folder with --out." if full else None
    return RunFolderError(f"cannot {do} {path}: {error.strerror or error}", remedy)
