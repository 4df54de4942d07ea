"""Metrics of each epoch as CSV, which everything can read."""

from __future__ import annotations

import csv
from pathlib import Path

from fulltilt.train import durable

METRICS_FILE = "metrics.csv"


class MetricLog:
    """Appends a line an epoch to ``OUT/metrics.csv``. A new column starts a new header line."""

    def __init__(self, out: Path) -> None:
        self.path = out / METRICS_FILE
        self._columns: list[str] | None = None

    def write(self, epoch: int, metrics: dict[str, float], seconds: float) -> None:
        """Log one epoch. Raises MachineError when the disk refuses."""
        row = {"epoch": epoch, "seconds": round(seconds, 3), **metrics}
        if self._columns is None:  # not before: a fresh run has put the file of the run before aside by now
            self._columns = _last_header(self.path)
        try:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, fieldnames=list(row))
                if list(row) != self._columns:
                    self._columns = list(row)
                    writer.writeheader()
                writer.writerow(row)
        except OSError as error:
            raise durable.cannot_write(self.path, error) from error


def _last_header(path: Path) -> list[str]:
    """The columns that a run before has written last; none when there was no such run."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return next((row for row in reversed(list(csv.reader(file))) if row[:1] == ["epoch"]), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
