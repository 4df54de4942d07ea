"""What changed under the working folder: sizes and times of its files, compared before and after a trial."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Not the user's work, or not a place that a job writes its results to.
LEFT_OUT = frozenset({".git", "__pycache__", ".venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"})
# A data set of millions of files may lie there: what cannot be looked at in this time is not watched.
LOOK_LIMIT_S = 1.0
MOST_NAMED = 12
MOST_TAKEN = 3


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Size and time of change of each file; ``whole`` unless there were too many to look at."""

    files: Mapping[str, tuple[int, int]]
    whole: bool


def look(folder: Path, left_out: Path, limit_s: float = LOOK_LIMIT_S) -> Snapshot:
    """The files under ``folder``, without those under ``left_out`` (the study's own)."""
    deadline = time.monotonic() + limit_s
    files: dict[str, tuple[int, int]] = {}
    todo = [str(folder)]
    own = str(left_out.resolve())
    output = _own_output()
    while todo:
        here = todo.pop()
        if time.monotonic() > deadline:
            return Snapshot(files, whole=False)
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name not in LEFT_OUT and os.path.realpath(entry.path) != own:
                            todo.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        seen = entry.stat(follow_symlinks=False)
                        if (seen.st_dev, seen.st_ino) not in output:
                            files[os.path.relpath(entry.path, folder)] = (seen.st_size, seen.st_mtime_ns)
        except OSError:
            continue  # a folder that went away, or that is not ours to read
    return Snapshot(files, whole=True)


def _own_output() -> set[tuple[int, int]]:
    """The files that this process itself prints to, as in `fulltilt tune train.py > tune.log`."""
    found = set()
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            seen = os.fstat(descriptor)
            found.add((seen.st_dev, seen.st_ino))
    return found


def differences(before: Snapshot, after: Snapshot) -> tuple[str, ...]:
    """``new a``, ``changed b`` and ``deleted c``, by name; the last entry counts what is left out."""
    found = []
    for name in sorted({*before.files, *after.files}):
        old, new = before.files.get(name), after.files.get(name)
        if old == new:
            continue
        if old is None:
            if before.whole:
                found.append(f"new {name}")
        elif new is None:
            if after.whole:
                found.append(f"deleted {name}")
        else:
            found.append(f"changed {name}")
    if len(found) > MOST_NAMED:
        return (*found[:MOST_NAMED], f"and {len(found) - MOST_NAMED} more")
    return tuple(found)


def taken_away(paths: Sequence[str], folder: Path) -> tuple[str, ...]:
    """``new a, b; taken away again``: files under ``folder`` that a trial has made and that are gone since."""
    names = sorted(os.path.relpath(path, folder) for path in paths if Path(path).is_relative_to(folder))
    more = f" and {len(names) - MOST_TAKEN} more" if len(names) > MOST_TAKEN else ""
    return (f"new {', '.join(names[:MOST_TAKEN])}{more}; taken away again",) if names else ()
