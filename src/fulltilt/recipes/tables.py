"""CSV files as people have them: other delimiters, a byte order mark, blanks around the names of columns."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

# A field may be this long; Python's own limit is 128 KiB.
_LONGEST_FIELD = 2**24
_DELIMITERS = (",", ";", "\t", "|")


@contextmanager
def opened(path: Path, wanted: Collection[str]) -> Iterator[csv.DictReader[str]]:
    """The rows of a CSV file, split by the delimiter under which its header has most of the columns ``wanted``."""
    csv.field_size_limit(_LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = file.readline()
        file.seek(0)
        found = max(_DELIMITERS, key=lambda delimiter: len(_names(header, delimiter) & set(wanted)))
        rows = csv.DictReader(file, delimiter=found)
        rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
        yield rows


def _names(header: str, delimiter: str) -> set[str]:
    return {name.strip() for name in next(csv.reader([header], delimiter=delimiter), ())}
