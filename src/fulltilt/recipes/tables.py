"""CSV files as people have them: other delimiters, a byte order mark, blanks around names and behind delimiters."""

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

    It is split by the delimiter under which its header has most of the columns ``wanted``. Raises DataError where it
    has one of them twice, since nobody could tell which is meant, and for a line with more values than the others: in
    it stands a text with a delimiter and no quotes, whose end would be taken for the next column, such as the label.
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
