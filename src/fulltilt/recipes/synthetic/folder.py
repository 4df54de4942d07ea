"""A folder of made data: written beside its place and renamed when complete, so that half of one is never used."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fulltilt.errors import MachineError, UsageError

# Kind → what one of its samples is called.
KINDS = {"cod": "image", "cars": "image", "text": "text", "hdf5": "window"}
MARK = "made-by-fulltilt.json"
_REMEDIES = {
    errno.ENOSPC: "Make room there, or give another folder.",
    errno.EDQUOT: "Make room there, or give another folder.",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f), or ask for fewer samples.",
}


def make_folder(kind: str, folder: Path, size: int, seed: int) -> bool:
    """Fill ``folder`` with made data; False when exactly this was in it already. Raises UsageError, MachineError.

    A folder that holds anything else is refused. Of several ranks that ask for the same folder, one makes it.
    """
    mark = {"kind": _known(kind), "size": size, "seed": seed}
    if _is_there(folder, mark):
        return False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f".{folder.name}.lock")):
            if _is_there(folder, mark):
                return False
            _make(kind, folder, size, seed, mark)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "Give another folder.")
        raise MachineError(f"cannot make {folder}: {error.strerror or error}", remedy) from error
    return True


def _make(kind: str, folder: Path, size: int, seed: int, mark: dict[str, object]) -> None:
    aside = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(aside, ignore_errors=True)  # of a maker that was killed
    aside.mkdir()
    try:
        _show(importlib.import_module(f"{__package__}.{kind}").make(aside, size, seed), size, f"making {kind}")
        (aside / MARK).write_text(json.dumps(mark) + "\n")
        if folder.exists():
            folder.rmdir()  # it is empty: anything else was refused
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _show(done: Iterator[int], size: int, label: str) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(label, total=size)
        for number in done:
            bar.update(task, completed=number)


def _known(kind: str) -> str:
    if kind not in KINDS:
        close = difflib.get_close_matches(kind[:80], KINDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"there is no made data {kind!r}{hint}", f"Kinds: {', '.join(KINDS)}.")
    return kind


def _is_there(folder: Path, mark: dict[str, object]) -> bool:
    try:
        if not folder.exists() or not any(folder.iterdir()):
            return False
        found = json.loads((folder / MARK).read_text())
    except NotADirectoryError as error:
        raise UsageError(f"{folder} is a file, not a folder") from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} is not empty, and Fulltilt did not make it", "Give an empty or new folder."
        ) from error
    if found != mark:
        holds = ", ".join(f"{key} {value}" for key, value in found.items())
        raise UsageError(f"{folder} holds other made data ({holds})", "Give another folder, or remove that one.")
    return True


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until nobody else makes the same folder. The lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows has one rank
        yield
        return
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), lock.stat()):
                break
        os.close(fd)  # who held it before us has removed it, and somebody else may have made it anew
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(fd)
