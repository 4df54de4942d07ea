"""The files of a data folder, those behind links to other folders included: data sets are often put together so."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def files_below(folder: str, _above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """The paths of all files in ``folder`` and below, in the order of their names; a circle of links is left."""
    folders: list[str] = []
    files: list[str] = []
    with contextlib.suppress(OSError):  # not ours to read
        status = os.stat(folder)  # noqa: PTH116 - a million files: Path would cost seconds
        here = status.st_dev, status.st_ino
        if here in _above:
            return
        _above |= {here}
        with os.scandir(folder) as entries:
            for entry in entries:
                (folders if entry.is_dir() else files).append(entry.path)
    yield from sorted(files)
    for inner in sorted(folders):
        yield from files_below(inner, _above)
