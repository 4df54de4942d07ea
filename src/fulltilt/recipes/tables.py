"""CSV files as people have them: other delimiters, a byte order mark, blanks around names and behind delimiters."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fulltilt.errors import DataError

# A field may be this long; Python's own limit is 128 KiB.
_LONGEST_FIELD = 2**24
_DELIMITERS = (",", ";", "\t", "|")


class Rows:
    """The lines of a table as dicts.

    Raises csv.Error for a line with more values than the others, in which a text with a delimiter stands without
    quotes: its end would be taken for the next column, such as the label.
    """

    def __init__(self, file: TextIO, delimiter: str) -> None:
        self._reader = csv.DictReader(file, delimiter=delimiter, skipinitialspace=True)
        self._delimiter = delimiter
        self.columns = [name.strip() for name in self._reader.fieldnames or ()]
        self._reader.fieldnames = self.columns

    @property
    def line_number(self) -> int:
        """Of the line that was read last."""
        return self._reader.line_num

    def __iter__(self) -> Iterator[dict[str, str]]:
        usual: int | None = None
        for row in self._reader:
            beyond = row.pop(None, None) or ()
            found = len(self.columns) + sum(bool(value.strip()) for value in beyond)
            usual = found if usual is None else usual  # all lines may have a value that the header has no name for
            if found != usual:
                raise csv.Error(
                    f"a line of {max(found, usual)} values among others of {min(found, usual)}; "
                    f"a text with {self._delimiter!r} in it needs quotes around it"
                )
            yield row


@contextmanager
def opened(path: Path, wanted: Collection[str]) -> Iterator[Rows]:
    """The rows of a CSV file, split by the delimiter under which its header has most of the columns ``wanted``.

    Raises DataError where it has one of them twice: nobody could tell which is meant.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = file.readline()
        file.seek(0)
        found = max(_DELIMITERS, key=lambda delimiter: len(_names(header, delimiter) & set(wanted)))
        rows = Rows(file, found)
        twice = [name for name in wanted if rows.columns.count(name) > 1]
        if twice:
            raise DataError(
                f"{path} has the column {twice[0]} {rows.columns.count(twice[0])} times", "Rename the others."
            )
        yield rows


def _names(header: str, delimiter: str) -> set[str]:
    return {name.strip() for name in next(csv.reader([header], delimiter=delimiter, skipinitialspace=True), ())}
