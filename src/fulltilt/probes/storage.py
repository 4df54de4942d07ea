"""A data folder: what it lies on, and how fast its own files read, cold and warm."""

from __future__ import annotations

from pathlib import Path

from fulltilt.errors import UsageError
from fulltilt.records import StorageReading

MIB = 1024**2


def read_storage(folder: str | Path, budget_s: float = 3.0, budget_bytes: int = 256 * MIB) -> StorageReading:
    """Measure ``folder`` within the budgets, reading only. Raises UsageError if it is not a folder."""
    path = Path(folder)
    if not path.exists():
        raise UsageError(f"the data folder {folder} does not exist")
    if not path.is_dir():
        raise UsageError(f"{folder} is a file; a data folder is needed")
    return StorageReading(path=str(folder))
