"""Copies of the user's files from before the first trial, for what writes past Python: a shell, a library in C.

Such a write is seen when it has happened. Who has changed a file is not known then, the trial or the user in an editor,
so that nothing is put back: the copy stays where the user is told of it. Copies of what did not change are deleted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from fulltilt.tuning.folder_watch import Snapshot

FOLDER = "before"
# Scripts, notes, figures and small models; a data set is neither written to by trials nor copied in no time.
MOST_BYTES = 256 << 20
MOST_S = 1.0
# Of what is free on the disk: the trials need room, too.
MOST_OF_FREE = 0.1


def copy_files(files: Snapshot, working_folder: Path, study: Path) -> None:
    """Copy the files of a snapshot into the study's folder, the smallest first, as far as time and room go.

    A copy that is there already is of a study that was stopped, and older: it stays.
    """
    deadline = time.monotonic() + MOST_S
    room = min(MOST_BYTES, MOST_OF_FREE * shutil.disk_usage(study).free)
    for name, (size, _) in sorted(files.files.items(), key=lambda item: item[1]):
        room -= size
        if room < 0 or time.monotonic() > deadline:
            return
        copy = study / FOLDER / name
        if copy.exists():
            continue
        with contextlib.suppress(OSError):  # one that may not be read, or that went away
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy_whole(working_folder / name, copy)


def _copy_whole(file: Path, copy: Path) -> None:
    """A copy with the file's own times, or none."""
    part = copy.with_name(f"{copy.name}.part")
    try:
        shutil.copyfile(file, part)
        shutil.copystat(file, part)
        part.rename(copy)
    finally:
        part.unlink(missing_ok=True)


def keep_changed(working_folder: Path, study: Path) -> list[str]:
    """After the trials: delete the copies of files that are as they were. Returns the names of the others."""
    kept = []
    for folder, _, names in os.walk(study / FOLDER, topdown=False):
        for copy in (Path(folder) / name for name in sorted(names)):
            name = str(copy.relative_to(study / FOLDER))
            if _is_as_it_was(working_folder / name, copy):
                copy.unlink()
            else:
                kept.append(name)
        with contextlib.suppress(OSError):  # something is kept in it
            Path(folder).rmdir()
    return sorted(kept)


def _is_as_it_was(file: Path, copy: Path) -> bool:
    try:
        now, then = file.lstat(), copy.lstat()
    except OSError:
        return False
    return (now.st_size, now.st_mtime_ns) == (then.st_size, then.st_mtime_ns)
