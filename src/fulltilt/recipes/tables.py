"""CSV files with any delimiter, a byte order mark, or spaces around names and after delimiters."""

from __future__ import annotations

import csv
from collections.abc import Collection
from pathlib import Path

from fulltilt.errors import DataError

# A field may be this long; Python's own limit is 128 KiB.
_LONGEST_FIELD = 2**24
_DELIMITERS = (",", ";", "\t", "|")


def read(path: Path, wanted: Collection[str]) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The columns of a CSV file, and its lines with their numbers.

    The delimiter is the one with which the header has most of the columns ``wanted``. Raises DataError for duplicates
    of these, and for a line with more values than the others: an unquoted text with a delimiter in it.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = file.readline().strip()
        file.seek(0)
        found_by = {one: {name.strip(' "') for name in header.split(one)} & {*wanted} for one in _DELIMITERS}
        delimiter = max(_DELIMITERS, key=lambda one: len(found_by[one]))
        reader = csv.DictReader(file, delimiter=delimiter, skipinitialspace=True)
        columns = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        twice = [name for name in wanted if columns.count(name) > 1]
        if twice:
            raise DataError(f"{path} has the column {twice[0]} {columns.count(twice[0])} times", "Rename the others.")
        rows: list[tuple[int, dict[str, str]]] = []
        usual: int | None = None  # all lines may have a value that the header has no name for
        try:
            for row in reader:
                beyond = row.pop(None, None) or ()
                found = len(columns) + sum(bool(value.strip()) for value in beyond)
                usual = usual or found
                if found != usual:
                    raise csv.Error(
                        f"a line of {max(found, usual)} values among others of {min(found, usual)}; "
                        f"a text with {delimiter!r} in it needs quotes around it"
                    )
                rows.append((reader.line_num, row))
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}", "Mend the line.") from error
    return columns, rows
