"""What speaks against workers for a loader that has none, seen around real fetches."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fulltilt.tune.live.serial import FILES_FIRST, FetchWatch

# Outside of the data set, where nothing but its use shows.
FILES: dict[str, TextIO] = {}


class Lines(Dataset[Any]):
    """Takes its samples from a file that stays open."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        FILES["read"].seek(2 * index)
        return torch.tensor(int(FILES["read"].readline()))


class Logged(Dataset[Any]):
    """Writes a line for every sample, as a logger or another thread would."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        FILES["written"].write(f"{index}\n")
        FILES["written"].flush()
        return torch.tensor(index)


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> Any:
    (tmp_path / "data").write_text("".join(f"{index}\n" for index in range(8)))
    with (tmp_path / "data").open() as read, (tmp_path / "log").open("w") as written:
        FILES.update(read=read, written=written)
        yield
        FILES.clear()


def problem_of(dataset: Dataset[Any]) -> str | None:
    iterator = iter(DataLoader(dataset, batch_size=1))
    watch = FetchWatch(iterator)
    for _ in range(FILES_FIRST):
        next(iterator)
    return watch.problem()


def test_a_file_that_is_read_on_would_be_shared_by_workers() -> None:
    found = problem_of(Lines())
    assert found is not None
    assert "reads from a file that stays open" in found


def test_a_file_that_is_only_written_to_is_no_reason_against_workers() -> None:
    """Fulltilt's own record is one: written during a fetch, it kept a starved job without workers."""
    assert problem_of(Logged()) is None
