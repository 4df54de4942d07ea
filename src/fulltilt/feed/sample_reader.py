"""Reading samples into rows of bytes, in a worker or here; one that cannot be read stops the job or is skipped."""

from __future__ import annotations

import bisect
import os
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from fulltilt.errors import DataError, FulltiltError
from fulltilt.feed.draws import sample_seed
from fulltilt.feed.epoch_order import sample_of
from fulltilt.feed.handles import own_module
from fulltilt.feed.random_state import Generators
from fulltilt.feed.sample_layout import Layout, ShapeChanged, Unstorable

# Attributes under which data sets keep their files, in the order in which they are asked for a sample's name.
_FILE_LISTS = ("samples", "imgs", "paths", "files", "image_paths", "images", "filenames", "image_files", "_files")

# Of a data set of which nothing is declared, one sample in so many is read twice while the first epoch is read.
READ_AGAIN_EVERY = 32


@dataclass(frozen=True)
class Failure:
    """A sample that could not be served, or (``random``) that may be served but not be kept."""

    index: int
    kind: Literal["corrupt", "shape", "random"]
    message: str
    name: str | None = None
    trace: str | None = None
    line: str | None = None  # of the user's code that raised it

    def where(self) -> str:
        """The sample's number and its file, where the data set tells it."""
        return f"sample {self.index}" + (f" ({self.name})" if self.name else "")


class Reader(Protocol):
    """Fills rows with samples. Sent to workers once; reads in each of them."""

    def opened_in_worker(self) -> None:
        """Called once in a worker process before its first read."""

    def read(self, indices: torch.Tensor, rows: torch.Tensor, epoch: int) -> list[Failure]:
        """Write the sample of draw ``indices[i]`` into ``rows[i]``; returns what failed."""


class Decoded:
    """A data set with a declared stage: ``decode(dataset[index])`` is the same every time, and is what is kept."""

    deterministic = True

    def __init__(self, dataset: Any, decode: Callable[[Any], Any]) -> None:
        self.dataset, self.decode = dataset, decode

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.dataset[index])


class SampleReader:
    """Reads a map-style data set, sample by sample or with its ``__getitems__``.

    ``seeded``: every generator starts from (seed, epoch, index), so that workers and ranks do not matter.
    ``checked``: nothing was declared; a sample that draws a random number or is another one when it is read again is
    reported, and from then on all are read seeded.
    """

    def __init__(self, dataset: Any, layout: Layout, *, seeded: bool, checked: bool, seed: int) -> None:
        self.dataset, self.layout, self.seed = dataset, layout, seed
        self.seeded, self.checked = seeded, checked
        self._generators: Generators | None = None
        self._in_worker = False

    def opened_in_worker(self) -> None:
        """Called once in a worker process before its first read."""
        self._in_worker = True

    def read(self, indices: torch.Tensor, rows: torch.Tensor, epoch: int) -> list[Failure]:
        """Write the sample of draw ``indices[i]`` into ``rows[i]``; returns what failed."""
        if not (self.seeded or self.checked):
            return self._read_plainly(sample_of(indices), rows)
        if self._generators is None:
            # Found here and not before the fork: a worker has instances of its own. One sample first, because a data
            # set may make its generators with it.
            with Generators(self.dataset).untouched(), suppress(Exception):
                self.dataset[int(sample_of(indices[0]))]
            self._generators = Generators(self.dataset)
        # In this process the user's own generators must not notice us; a worker's belong to us.
        with nullcontext() if self._in_worker else self._generators.untouched():
            if self.seeded:
                return self._read_seeded(indices, rows, epoch, self._generators)
            return self._read_checked(indices, rows, epoch, self._generators)

    def _read_plainly(self, indices: torch.Tensor, rows: torch.Tensor) -> list[Failure]:
        failures = self._read_together(indices, rows)
        if failures is None:
            failures = _failed(read_one(self.dataset, i, self.layout, row) for i, row in _pairs(indices, rows))
        return failures

    def _read_seeded(
        self, draws: torch.Tensor, rows: torch.Tensor, epoch: int, generators: Generators
    ) -> list[Failure]:
        failures = []
        for draw, row in _pairs(draws, rows):
            generators.seed(sample_seed(self.seed, epoch, draw))
            failures.append(read_one(self.dataset, sample_of(draw), self.layout, row))
        return _failed(failures)

    def _read_checked(
        self, draws: torch.Tensor, rows: torch.Tensor, epoch: int, generators: Generators
    ) -> list[Failure]:
        indices = sample_of(draws)
        before = generators.mark()
        failures = self._read_plainly(indices, rows)
        found = "it draws random numbers" if before != generators.mark() else None
        bad = {failure.index for failure in failures}
        again = torch.zeros_like(rows[0])
        for position, index in enumerate(indices.tolist()):
            if found is not None:
                break
            if index % READ_AGAIN_EVERY == 0 and index not in bad:
                generators.seed(sample_seed(self.seed + 1, epoch, index))
                if read_one(self.dataset, index, self.layout, again) is not None or not torch.equal(
                    again, rows[position]
                ):
                    found = "it is another one when it is read again"
        if found is None:
            return failures
        self.seeded = True
        index = int(indices[0])
        told = Failure(index, "random", found, name_of(self.dataset, index))
        return [told, *self._read_seeded(draws, rows, epoch, generators)]

    def _read_together(self, indices: torch.Tensor, rows: torch.Tensor) -> list[Failure] | None:
        """One call for all samples; None where that does not work: read one by one, a culprit can be named."""
        try:
            if type(self.dataset) is torch.utils.data.TensorDataset:
                for part, column in zip(self.layout.split(rows), self.dataset[indices], strict=True):
                    part.copy_(column)
                return []
            # torch's own Subset has the method too, and only loops in it.
            if not hasattr(self.dataset, "__getitems__") or isinstance(self.dataset, torch.utils.data.Subset):
                return None
            for row, sample in zip(rows, self.dataset.__getitems__(indices.tolist()), strict=True):
                self.layout.pack(sample, row)
        except Exception:
            return None
        return []


def _pairs(indices: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    return zip(indices.tolist(), rows, strict=True)


def _failed(failures: Iterable[Failure | None]) -> list[Failure]:
    return [failure for failure in failures if failure is not None]


def read_one(dataset: Any, index: int, layout: Layout, row: torch.Tensor) -> Failure | None:
    """Write one sample into ``row``; None when it went well."""
    try:
        sample = dataset[index]
    except Exception as error:
        return failure_of(dataset, index, error)
    return pack_one(dataset, index, sample, layout, row)


def failure_of(dataset: Any, index: int, error: Exception) -> Failure:
    """What is told of ``error``, which sample ``index`` raised."""
    name = name_of(dataset, index) or getattr(error, "filename", None)
    trace = "".join(traceback.format_exception(type(error), error, _below_ours(error)))
    return Failure(index, "corrupt", one_line(error), name and str(name), trace, _users_line(error))


def _below_ours(error: Exception) -> types.TracebackType | None:
    """The way to ``error`` from where the data set was asked: how it came to be asked tells its owner nothing."""
    way = error.__traceback__
    while way is not None and way.tb_next is not None and _is_ours(way.tb_frame):
        way = way.tb_next
    return way


def _is_ours(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]


def _users_line(error: Exception) -> str | None:
    """The innermost line of the user's own code on the way to ``error``."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if own_module(str(frame.f_globals.get("__name__"))) and not _is_ours(frame):
            return f"{Path(frame.f_code.co_filename).name}, line {number}, in {frame.f_code.co_name}"
    return None


def pack_one(dataset: Any, index: int, sample: Any, layout: Layout, row: torch.Tensor) -> Failure | None:
    """Write an already drawn sample into ``row``; None when it fits the layout."""
    try:
        layout.pack(sample, row)
    except (ShapeChanged, Unstorable) as error:
        return Failure(index, "shape", str(error), name_of(dataset, index))
    return None


def name_of(dataset: Any, index: int) -> str | None:
    """The file of sample ``index``, where the data set keeps a list of files; looks into Subset and ConcatDataset."""
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


def one_line(error: Exception) -> str:
    """What ``error`` says, with its type; an error of ours says enough by itself."""
    if isinstance(error, FulltiltError):
        return " ".join(error.what.split())
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


Policy = Literal["stop", "skip"]
TO_ONE_SHAPE = "Resize, crop, pad or convert all samples to one shape and type, or give a collate_fn that does."


class ShapesDiffer(DataError):  # noqa: N818 - as all errors of this project
    """Samples of one data set have different shapes; the message says which."""


class BadSamples:
    """Remembers which samples are bad. ``note`` raises DataError when the policy says so."""

    def __init__(self, samples: int, policy: Policy = "stop", max_share: float = 0.01) -> None:
        self.samples = samples
        self.policy = policy
        self.max_share = max_share
        self.bad = torch.zeros(samples, dtype=torch.bool)
        self.failures: dict[int, Failure] = {}

    def note(self, failures: Iterable[Failure]) -> list[Failure]:
        """Take failures in; returns those that are new. Raises DataError for the first one under ``stop``."""
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
        # One bad sample of a small data set is no epidemic, whatever its share.
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


def pass_over(number: int, epoch: int, *, awaited: bool) -> None:
    """A batch of which no sample is left is not served. Raises DataError where that would be waited for."""
    if awaited:
        raise DataError(
            f"every sample of batch {number} of epoch {epoch} is bad, and the other ranks or the trainer count on it",
            "Repair the samples that were skipped (loader.notes names them), or use larger batches.",
        )


def stopped_by(failure: Failure) -> DataError:
    """The error for one bad sample, with what to do about it."""
    if failure.kind == "shape":
        return ShapesDiffer(f"{failure.where()} differs from the first sample: {failure.message}", TO_ONE_SHAPE)
    raised_in = f" ({failure.line})" if failure.line else ""
    error = DataError(
        f"{failure.where()} cannot be read: {failure.message}{raised_in}",
        "Repair or remove it, or skip such samples with on_bad_sample='skip'.",
    )
    if failure.trace:
        error.add_note(f"In the data set:\n{failure.trace.rstrip()}")
    return error
