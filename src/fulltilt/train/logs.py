"""Metrics of each epoch as CSV, which everything can read, and to TensorBoard where it is installed."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

from fulltilt.train import durable


class MetricLog:
    """Appends a line an epoch to ``OUT/metrics.csv``. A new column starts a new header line."""

    def __init__(self, out: Path) -> None:
        self.path = out / "metrics.csv"
        self._columns: list[str] = []
        self._board: Any = None
        self._board_folder = out / "tensorboard"

    def write(self, epoch: int, metrics: dict[str, float], seconds: float) -> None:
        """Log one epoch. Raises MachineError when the disk refuses."""
        row = {"epoch": epoch, "seconds": round(seconds, 3), **metrics}
        try:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, fieldnames=list(row))
                if list(row) != self._columns:
                    self._columns = list(row)
                    writer.writeheader()
                writer.writerow(row)
        except OSError as error:
            raise durable.cannot_write(self.path, error) from error
        if self._board is None and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._board_folder))  # type: ignore[no-untyped-call, unused-ignore]
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, epoch)

    def close(self) -> None:
        """Flush what is open."""
        if self._board is not None:
            self._board.close()
