"""Reading samples into rows of bytes, in a worker or in this process; what goes wrong is told, not raised."""

from __future__ import annotations

import bisect
import os
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from fulltilt.feed.draws import sample_seed
from fulltilt.feed.generators import Generators
from fulltilt.feed.structure import Layout, ShapeChanged, Unstorable

# Attributes under which data sets keep their files, in the order in which they are asked for a sample's name.
_FILE_LISTS = ("samples", "imgs", "paths", "files", "image_paths", "images", "filenames", "image_files", "_files")


@dataclass(frozen=True)
class Failure:
    """A sample that could not be served, or (``random``) that may be served but not be kept."""

    index: int
    kind: Literal["corrupt", "shape", "random"]
    message: str
    name: str | None = None
    trace: str | None = None

    def where(self) -> str:
        """The sample's number and its file, where the data set tells it."""
        return f"sample {self.index}" + (f" ({self.name})" if self.name else "")


class Reader(Protocol):
    """Fills rows with samples. Sent to workers once; reads in each of them."""

    def opened_in_worker(self) -> None:
        """Called once in a worker process before its first read."""

    def read(self, indices: torch.Tensor, rows: torch.Tensor, epoch: int) -> list[Failure]:
        """Write sample ``indices[i]`` into ``rows[i]``; returns what failed."""


class SampleReader:
    """Reads a map-style data set, sample by sample or with its ``__getitems__``.

    ``random=False``: the data set is deterministic; a sample that draws a random number is reported.
    ``random=True``: every generator starts from (seed, epoch, index), so that workers and ranks do not matter.
    """

    def __init__(self, dataset: Any, layout: Layout, *, random: bool, seed: int) -> None:
        self.dataset = dataset
        self.layout = layout
        self.random = random
        self.seed = seed
        self._generators: Generators | None = None
        self._in_worker = False

    def opened_in_worker(self) -> None:
        """Called once in a worker process before its first read."""
        self._in_worker = True
        # Forked workers start with the same numbers. That matters only if a data set that was taken for
        # deterministic turns out not to be: then the rest of its epoch must at least differ between workers.
        Generators(self.dataset).seed(os.getpid())

    def read(self, indices: torch.Tensor, rows: torch.Tensor, epoch: int) -> list[Failure]:
        """Write sample ``indices[i]`` into ``rows[i]``; returns what failed."""
        if self._generators is None:
            # Found here and not before the fork: a worker has instances of its own.
            self._generators = Generators(self.dataset)
        generators = self._generators
        if not self.random and self._batched():
            together = self._read_together(indices, rows, generators)
            if together is not None:
                return together
        failures: list[Failure] = []
        # In this process the user's own generators must not notice us; a worker's belong to us.
        with nullcontext() if self._in_worker else generators.untouched():
            mark = None if self.random else generators.mark()
            for position, index in enumerate(indices.tolist()):
                if self.random:
                    generators.seed(sample_seed(self.seed, epoch, index))
                failure = read_one(self.dataset, index, self.layout, rows[position])
                if mark is not None:
                    after = generators.mark()
                    if failure is None and mark != after:
                        failure = Failure(index, "random", "it draws random numbers", name_of(self.dataset, index))
                    mark = after
                if failure is not None:
                    failures.append(failure)
        return failures

    def _batched(self) -> bool:
        # torch's own Subset has the method too, and only loops in it.
        return hasattr(self.dataset, "__getitems__") and not isinstance(self.dataset, torch.utils.data.Subset)

    def _read_together(self, indices: torch.Tensor, rows: torch.Tensor, generators: Generators) -> list[Failure] | None:
        """One call for all samples; None if anything is wrong: read one by one, the culprit can be named."""
        with nullcontext() if self._in_worker else generators.untouched():
            mark = generators.mark()
            try:
                samples = self.dataset.__getitems__(indices.tolist())
                for row, sample in zip(rows, samples, strict=True):
                    self.layout.pack(sample, row)
            except Exception:
                return None
            return [] if mark == generators.mark() else None


def read_one(dataset: Any, index: int, layout: Layout, row: torch.Tensor) -> Failure | None:
    """Write one sample into ``row``; None when it went well."""
    try:
        sample = dataset[index]
    except Exception as error:
        name = name_of(dataset, index) or getattr(error, "filename", None)
        return Failure(index, "corrupt", _one_line(error), name and str(name), traceback.format_exc(limit=-6))
    return pack_one(dataset, index, sample, layout, row)


def pack_one(dataset: Any, index: int, sample: Any, layout: Layout, row: torch.Tensor) -> Failure | None:
    """Write an already drawn sample into ``row``; None when it fits the layout."""
    try:
        layout.pack(sample, row)
    except (ShapeChanged, Unstorable) as error:
        return Failure(index, "shape", str(error), name_of(dataset, index))
    return None


def name_of(dataset: Any, index: int) -> str | None:
    """The file of sample ``index``, where the data set keeps a list of files; looks into Subset and ConcatDataset."""
    inner, picked = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is not None and picked is not None:
        try:
            return name_of(inner, int(picked[index]))
        except (IndexError, TypeError, ValueError):
            return None
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        part = bisect.bisect_right(dataset.cumulative_sizes, index)
        before = dataset.cumulative_sizes[part - 1] if part else 0
        return name_of(dataset.datasets[part], index - before)
    for attribute in _FILE_LISTS:
        files = getattr(dataset, attribute, None)
        if isinstance(files, list | tuple) and index < len(files):
            entry = files[index]
            first = entry[0] if isinstance(entry, list | tuple) and entry else entry
            if isinstance(first, str | Path):
                return os.fspath(first)
    return None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
