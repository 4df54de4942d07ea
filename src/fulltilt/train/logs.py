"""Metrics of each epoch as CSV, which everything can read."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from fulltilt import store
from fulltilt.errors import ForeignFiles
from fulltilt.train import durable
from fulltilt.train.checkpoint import METRICS_FILE

Row = dict[str, str]


class MetricLog:
    """Keeps a row an epoch in ``OUT/metrics.csv``. An epoch that is trained once more has its row replaced.

    A run comes back to an epoch after a fall-back to an earlier checkpoint, or to finish one that was cut short.
    """

    def __init__(self, out: Path) -> None:
        self.path = out / METRICS_FILE
        self._rows: dict[int, Row] | None = None

    def write(self, epoch: int, metrics: dict[str, float], seconds: float) -> None:
        """Log one epoch. Raises MachineError when the disk refuses, ForeignFiles for a file that we did not write."""
        row = {"epoch": str(epoch), "seconds": str(round(seconds, 3))}
        row.update({name: str(value) for name, value in metrics.items()})
        try:
            if self._rows is None:  # not before: a fresh run has put the file of the run before aside by now
                self._rows = dict(_rows(self.path.read_bytes().decode())) if self.path.exists() else {}
        except OSError as error:
            raise durable.cannot_write(self.path, error) from error
        except (ValueError, csv.Error) as error:
            raise ForeignFiles(f"{self.path} is not a table of epochs and is left as it is") from error
        self._rows[epoch] = row
        text = io.StringIO(newline="")
        columns = dict.fromkeys(name for number in sorted(self._rows) for name in self._rows[number])
        writer = csv.DictWriter(text, list(columns))
        writer.writeheader()
        writer.writerows(self._rows[number] for number in sorted(self._rows))
        store.write_text(self.path, text.getvalue())


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
