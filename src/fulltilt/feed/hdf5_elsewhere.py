"""What an HDF5 file takes from other files. Where one of them is gone the library gives zeros, and no error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fulltilt.errors import DataError

_BRING = "Put the file back where it was, or copy all rows into one file."


def refuse_missing(data: Any, name: str, key: str) -> None:
    """Raise DataError where rows of ``data``, a virtual data set, come from a file or key that is not there."""
    import h5py

    if not data.is_virtual:
        return
    wanted: dict[str, set[str]] = {}
    for source in data.virtual_sources():
        # "." is the file itself; with %b the library counts through as many files as there are.
        if source.file_name != "." and "%b" not in source.file_name:
            wanted.setdefault(source.file_name, set()).add(source.dset_name)
    for other, keys in wanted.items():
        found = _found(other, Path(name).parent)
        if found is None:
            raise DataError(f"{name}: rows of {key!r} come from {other}, which is not there", _BRING)
        try:
            with h5py.File(found, "r") as opened:
                absent = sorted(inner for inner in keys if "%b" not in inner and inner not in opened)
        except OSError as error:
            raise DataError(f"{name}: rows of {key!r} come from {found}, which cannot be read: {error}") from error
        if absent:
            raise DataError(f"{name}: rows of {key!r} come from {absent[0]!r} in {found}, which has no such key")


def broken_link(file: Any, name: str, key: str) -> DataError | None:
    """The error for a key that only points into another file, which cannot be opened; None for any other key."""
    import h5py

    link = file.get(key, getlink=True)
    if not isinstance(link, h5py.ExternalLink):
        return None
    return DataError(f"{name}: {key!r} is a link to {link.path!r} in {link.filename}, which cannot be opened", _BRING)


def _found(other: str, beside: Path) -> Path | None:
    """Where the library would look for a source of a virtual data set, in its order."""
    prefix = os.environ.get("HDF5_VDS_PREFIX", "").replace("${ORIGIN}", str(beside))
    places = [Path(other), Path(prefix) / other if prefix else None, beside / other, beside / Path(other).name]
    return next((place for place in places if place is not None and place.exists()), None)
