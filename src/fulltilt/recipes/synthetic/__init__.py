"""Synthetic data in the recipes' formats: learnable but not easy, and the same for the same seed on any machine.

Each kind is a module with ``make(folder, size, seed)``, which writes the data set into an empty folder and yields once
for each sample.
"""

from __future__ import annotations

import errno
import importlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from fulltilt.errors import MachineError, RunFolderError, UsageError
from fulltilt.feed.progress import progress
from fulltilt.probes.host import cpu_capacity
from fulltilt.recipes.out_folder import remove_private
from fulltilt.store import OwnedFolder, read_json
from fulltilt.train.config import did_you_mean

# Kind → the name of a sample.
KINDS = {"cod": "image", "cars": "image", "text": "text", "hdf5": "window"}
# Describes the data. Written last: a folder without it is not complete.
DESCRIPTION = "synthetic.json"
# Samples per piece of work: many enough to amortise its cost, few enough for the progress bar.
PIECE = 50
_REMEDIES = {
    errno.ENOSPC: "Make room there, or give another folder.",
    errno.EDQUOT: "Make room there, or give another folder.",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f), or ask for fewer samples.",
}


def make_folder(kind: str, folder: Path, size: int, seed: int) -> bool:
    """Fill ``folder`` with synthetic data; False when it holds this data already. Raises UsageError, MachineError.

    A folder with anything else is refused. Of several ranks, one fills it.
    """
    if kind not in KINDS:
        what = f"there is no synthetic data {kind!r}{did_you_mean(kind, KINDS)}"
        raise UsageError(what, f"Kinds: {', '.join(KINDS)}.")
    wanted = {"kind": kind, "size": size, "seed": seed}
    if _holds(folder, wanted):
        return False
    owned = OwnedFolder.claim(folder, "data set", flag="DIR")
    try:
        with owned.locked(f"{folder} is being filled", wait=True):
            if _holds(folder, wanted):
                return False
            _fill(owned, kind, size, seed)
            owned.write(DESCRIPTION, json.dumps(wanted).encode() + b"\n")
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "Give another folder.")
        raise MachineError(f"cannot make {folder}: {error.strerror or error}", remedy) from error
    return True


def _holds(folder: Path, wanted: dict[str, Any]) -> bool:
    """Whether the folder holds this data. Raises UsageError for other synthetic data."""
    try:
        found = read_json(folder / DESCRIPTION, follow=True)
    except RunFolderError:
        return False
    if found == wanted:
        return True
    if not isinstance(found, dict):
        return False
    holds = ", ".join(f"{key} {value}" for key, value in found.items())
    raise UsageError(f"{folder} holds other synthetic data ({holds})", "Give another folder, or remove that one.")


def _fill(owned: OwnedFolder, kind: str, size: int, seed: int) -> None:
    """Make the data in a private folder, then move it to its place."""
    remove_private(owned, ".*.tmp")  # of one that was killed
    for name in owned.entries():
        owned.remove(name)
    private = owned.make(owned.temporary("making"))
    try:
        samples = importlib.import_module(f"{__name__}.{kind}").make(private, size, seed)
        for _ in progress(samples, size, f"making {kind}"):
            pass
        owned.record_tree(private)
        for entry in sorted(private.iterdir()):
            owned.move(entry, owned.path / entry.name)
    finally:
        remove_private(owned, private.name)


def in_processes(write: Callable[[range], None], size: int) -> Iterator[int]:
    """Call ``write`` with the pieces of ``range(size)`` in processes; yields the samples that are done."""
    pieces = [range(first, min(first + PIECE, size)) for first in range(0, size, PIECE)]
    processes = max(min(int(cpu_capacity().usable), len(pieces)), 1)
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), initializer=_end_with_the_parent)
    try:
        for piece, _ in zip(pieces, pool.map(write, pieces), strict=True):
            yield from piece
    finally:
        pool.shutdown(cancel_futures=True)  # after an error only running pieces are waited for


def _end_with_the_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
