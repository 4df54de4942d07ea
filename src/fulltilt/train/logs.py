"""Metrics of each epoch as CSV, which everything can read."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from fulltilt import store
from fulltilt.train import durable

METRICS_FILE = "metrics.csv"

Row = dict[str, str]


class MetricLog:
    """Keeps a row an epoch in ``OUT/metrics.csv``. An epoch that is trained once more has its row replaced.

    A run comes back to an epoch after a fall-back to an earlier checkpoint, or to finish one that was cut short.
    """

    def __init__(self, out: Path) -> None:
        self.path = out / METRICS_FILE
        self._columns: list[str] | None = None
        self._newest = 0
        self._ours = True

    def write(self, epoch: int, metrics: dict[str, float], seconds: float) -> None:
        """Log one epoch. Raises MachineError when the disk refuses."""
        row = {"epoch": str(epoch), "seconds": str(round(seconds, 3))}
        row.update({name: str(value) for name, value in metrics.items()})
        try:
            if self._columns is None:  # not before: a fresh run has put the file of the run before aside by now
                self._columns = self._look()
            if epoch > self._newest and set(row) <= set(self._columns):
                self._append(row, self._columns)
            elif self._ours:
                self._columns = self._rewrite(epoch, row)
            else:
                self._columns = list(row)
                self._append(dict(zip(row, row, strict=True)), self._columns)
                self._append(row, self._columns)
            self._newest = max(self._newest, epoch)
        except OSError as error:
            raise durable.cannot_write(self.path, error) from error

    def _look(self) -> list[str]:
        """The columns under which rows can be appended to the file; none where it has to be written anew."""
        try:
            text = self.path.read_bytes().decode() if self.path.exists() else ""
            rows = _rows(text)
        except (ValueError, csv.Error):  # not what we write: it is added to, and never written anew
            self._ours = False
            return []
        epochs = [epoch for epoch, _ in rows]
        self._newest = max(epochs, default=0)
        tidy = len({tuple(row) for _, row in rows}) == 1 and epochs == sorted(set(epochs)) and text.endswith("\n")
        return list(rows[0][1]) if tidy else []

    def _append(self, row: Row, columns: list[str]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, columns).writerow(row)

    def _rewrite(self, epoch: int, row: Row) -> list[str]:
        """Put the row in its place, with the columns that are new; whole or not at all. Returns the columns."""
        before = _rows(self.path.read_bytes().decode()) if self.path.exists() else []
        rows = {**dict(before), epoch: row}
        columns = list(dict.fromkeys(name for number in sorted(rows) for name in rows[number]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows[number] for number in sorted(rows))
        store.write_text(self.path, text.getvalue())
        return columns


def _rows(text: str) -> list[tuple[int, Row]]:
    """The epochs of the runs before. Several headers may stand between them; a line that a kill cut short is dropped.

    Raises ValueError and csv.Error for lines that are not ours.
    """
    found: list[tuple[int, Row]] = []
    header: list[str] = []
    for line in csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline="")):
        if line[:1] == ["epoch"]:
            header = line
        else:
            row = dict(zip(header, line, strict=True))
            found.append((int(row.get("epoch", "")), row))
    return found
