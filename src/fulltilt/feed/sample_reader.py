"""Reads samples into rows of bytes; one that cannot be read stops the job or is skipped."""

from __future__ import annotations

import bisect
import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from fulltilt.errors import DataError, FulltiltError
from fulltilt.feed.dataset_objects import Generators, generators_of_samples
from fulltilt.feed.epoch_order import sample_of
from fulltilt.feed.random_numbers import sample_seed
from fulltilt.feed.sample_layout import Layout, ShapeChanged, Unstorable
from fulltilt.recorder.user_code import owner

# Attributes in which data sets keep their files, in the order of looking.
_FILE_LISTS = ("samples", "imgs", "paths", "files", "image_paths", "images", "filenames", "image_files", "_files")


@dataclass(frozen=True)
class Failure:
    """A sample that could not be read, or (``random``) must not be kept."""

    index: int
    kind: Literal["corrupt", "shape", "random"]
    message: str
    name: str | None = None
    trace: str | None = None
    line: str | None = None  # of the user's code that raised it

    def where(self) -> str:
        """The sample's number, and its file where known."""
        return f"sample {self.index}" + (f" ({self.name})" if self.name else "")


class Reader(Protocol):
    """Fills rows with samples, in each worker."""

    def read(self, indices: torch.Tensor, rows: torch.Tensor, epoch: int) -> list[Failure]:
        """Write the sample of draw ``indices[i]`` into ``rows[i]``; returns what failed."""


class Decoded:
    """A data set with a declared stage: ``decode(dataset[index])`` is deterministic, and is what is kept."""

    deterministic = True

    def __init__(self, dataset: Any, decode: Callable[[Any], Any]) -> None:
        self.dataset, self.decode = dataset, decode

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.dataset[index])


class SampleReader:
    """Reads a map-style data set, sample by sample or with its ``__getitems__``.

    ``seeded``: generators are seeded by (seed, epoch, index), so that workers and ranks do not matter.
    ``checked``: a sample that draws random numbers is reported, and from then on all are seeded.
    """

    def __init__(self, dataset: Any, layout: Layout, *, seeded: bool, checked: bool, seed: int) -> None:
        self.dataset, self.layout, self.seed = dataset, layout, seed
        self.seeded, self.checked = seeded, checked
        self._generators: Generators | None = None

    def read(self, indices: torch.Tensor, rows: torch.Tensor, epoch: int) -> list[Failure]:
        """Write the sample of draw ``indices[i]`` into ``rows[i]``; returns what failed."""
        if not (self.seeded or self.checked):
            return self._read_plainly(sample_of(indices), rows)
        if self._generators is None:
            self._generators = generators_of_samples(self.dataset, int(sample_of(indices[0])))
        with self._generators.untouched():
            failures: list[Failure] = []
            if not self.seeded:
                before = self._generators.marks()
                failures = self._read_plainly(sample_of(indices), rows)
                if before == self._generators.marks():
                    return failures
                self.seeded = True
                index = int(sample_of(indices[0]))
                failures = [Failure(index, "random", "it draws random numbers", name_of(self.dataset, index))]
            for draw, row in zip(indices.tolist(), rows, strict=True):
                self._generators.seed(sample_seed(self.seed, epoch, draw))
                failures += self._read_one(sample_of(draw), row)
            return failures

    def _read_plainly(self, indices: torch.Tensor, rows: torch.Tensor) -> list[Failure]:
        failures: list[Failure] = []
        if not self._read_together(indices, rows):
            for index, row in zip(indices.tolist(), rows, strict=True):
                failures += self._read_one(index, row)
        return failures

    def _read_together(self, indices: torch.Tensor, rows: torch.Tensor) -> bool:
        """One call for all samples; False where that fails: one by one, the bad sample can be named."""
        try:
            if type(self.dataset) is torch.utils.data.TensorDataset:
                for part, column in zip(self.layout.split(rows), self.dataset[indices], strict=True):
                    part.copy_(column)
                return True
            # torch's own Subset has the method too, and only loops in it.
            if not hasattr(self.dataset, "__getitems__") or isinstance(self.dataset, torch.utils.data.Subset):
                return False
            for row, sample in zip(rows, self.dataset.__getitems__(indices.tolist()), strict=True):
                self.layout.pack(sample, row)
        except Exception:
            return False
        return True

    def _read_one(self, index: int, row: torch.Tensor) -> list[Failure]:
        try:
            sample = self.dataset[index]
        except Exception as error:
            return [failure_of(self.dataset, index, error)]
        try:
            self.layout.pack(sample, row)
        except (ShapeChanged, Unstorable) as error:
            return [Failure(index, "shape", str(error), name_of(self.dataset, index))]
        return []


def failure_of(dataset: Any, index: int, error: Exception) -> Failure:
    """The Failure for ``error``, raised by sample ``index``."""
    name = name_of(dataset, index) or getattr(error, "filename", None)
    trace = "".join(traceback.format_exception(error))
    return Failure(index, "corrupt", _one_line(error), name and str(name), trace, _users_line(error))


def _users_line(error: Exception) -> str | None:
    """The innermost line of the user's code in the traceback."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if owner(frame.f_code.co_filename) == "user":
            return f"{Path(frame.f_code.co_filename).name}, line {number}, in {frame.f_code.co_name}"
    return None


def name_of(dataset: Any, index: int) -> str | None:
    """The file of sample ``index``, if the data set keeps a list of files; also in Subset and ConcatDataset."""
    if isinstance(dataset, Decoded):
        return name_of(dataset.dataset, index)
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
    """The error's type and message; for our own errors the message."""
    if isinstance(error, FulltiltError):
        return " ".join(error.what.split())
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


Policy = Literal["stop", "skip"]


class ShapesDiffer(DataError):  # noqa: N818 - as all errors of Fulltilt
    """Samples of one data set have different shapes; the message says which."""


class BadSamples:
    """The bad samples of a data set. ``note`` raises DataError when the policy says so."""

    def __init__(self, samples: int, policy: Policy = "stop", max_share: float = 0.01) -> None:
        self.samples = samples
        self.policy = policy
        self.max_share = max_share
        self.bad = torch.zeros(samples, dtype=torch.bool)
        self.failures: dict[int, Failure] = {}

    def note(self, failures: Iterable[Failure]) -> list[Failure]:
        """Add failures and return the new ones. Raises DataError for the first one under ``stop``."""
        new = []
        for failure in failures:
            if failure.kind == "random":
                continue
            if self.policy == "stop":
                raise stopped_by(failure)
            if failure.index not in self.failures:
                new.append(failure)
                self.failures[failure.index] = failure
                self.bad[failure.index] = True
        # One bad sample is always allowed, also in a small data set.
        if len(self.failures) > max(1, int(self.max_share * self.samples)):
            named = "; ".join(f"{failure.where()}: {failure.message}" for failure in list(self.failures.values())[:3])
            raise DataError(
                f"{len(self.failures)} of {self.samples} samples are bad, more than the {self.max_share:.1%} allowed",
                f"The first ones: {named}. Repair them, or raise max_bad_share.",
            )
        return new

    def without_bad(self, draws: torch.Tensor) -> torch.Tensor:
        """``draws`` less those of bad samples."""
        return draws[~self.bad[sample_of(draws)]] if self.failures else draws


def stopped_by(failure: Failure) -> DataError:
    """The error for one bad sample, with what to do about it."""
    if failure.kind == "shape":
        return ShapesDiffer(
            f"{failure.where()} differs from the first sample: {failure.message}",
            "Resize, crop, pad or convert all samples to one shape and type, or keep the DataLoader.",
        )
    error = DataError(
        f"{failure.where()} cannot be read: {failure.message}" + (f" ({failure.line})" if failure.line else ""),
        "Repair or remove it, or skip such samples with on_bad_sample='skip'.",
    )
    if failure.trace:
        error.add_note(f"In the data set:\n{failure.trace.rstrip()}")
    return error
