"""One thread for every job under test: sums over two threads may differ in their last bit. Its files are in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

MEMORY = Path("/dev/shm")
# Loader workers hand their batches over there, too.
LEAST_FREE_BYTES = 2**30


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Each checkpoint is flushed to the disk nine times, and how long a disk takes for that is not the question."""
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < LEAST_FREE_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="fulltilt-test-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
