"""Counting the files of a folder within a time limit, and drawing a fair sample of them on the way."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Below this a file is read in one go, and opening it costs as much as reading it.
SMALL_FILE_BYTES = 1024**2

_SAMPLE_FILES = 1000


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file and its size."""

    path: str
    size_bytes: int


@dataclass(slots=True)
class Census:
    """What was counted, and a sample of the small and of the large files in which each had the same chance."""

    files: int = 0
    total_bytes: int = 0
    fully: bool = True
    small: list[FoundFile] = field(default_factory=list)
    large: list[FoundFile] = field(default_factory=list)


def count_files(folder: Path, deadline_s: float) -> Census:
    """Count until ``time.perf_counter()`` reaches the deadline. Links to files and folders are followed once."""
    census = Census()
    draw = random.Random(0)  # the same folder gives the same sample
    seen = {"small": 0, "large": 0}
    for entry in _files(folder, census):
        try:
            size = entry.stat().st_size
        except OSError:
            continue
        census.files += 1
        census.total_bytes += size
        group = "small" if size < SMALL_FILE_BYTES else "large"
        seen[group] += 1
        sample: list[FoundFile] = getattr(census, group)
        if len(sample) < _SAMPLE_FILES:
            sample.append(FoundFile(entry.path, size))
        elif (slot := draw.randrange(seen[group])) < _SAMPLE_FILES:
            sample[slot] = FoundFile(entry.path, size)
        if time.perf_counter() >= deadline_s:
            census.fully = False
            break
    # Files lie on the disk in the order of their folders; a training job does not read them so.
    draw.shuffle(census.small)
    draw.shuffle(census.large)
    return census


def _files(folder: Path, census: Census) -> Iterator[os.DirEntry[str]]:
    todo, visited = [str(folder)], set()
    while todo:
        path = todo.pop()
        try:
            status = os.stat(path)  # noqa: PTH116 - plain strings keep a million entries cheap
            if (status.st_dev, status.st_ino) in visited:
                continue  # a link back to a folder that was counted
            visited.add((status.st_dev, status.st_ino))
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir():
                        todo.append(entry.path)
                    elif entry.is_file():
                        yield entry
        except OSError:
            census.fully = False  # a folder that we may not read
