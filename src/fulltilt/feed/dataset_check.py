"""Checks whether the samples of a data set may be kept: their layout, and whether they are deterministic.

A declaration (``decode=``, or ``deterministic = True`` in the data set) is trusted. Without one a data set is kept only
if a few samples, each fetched several times under different seeds, are equal bit for bit and draw nothing from the
generators of random, numpy and torch. The generators are also watched during the first epoch (``sample_reader.py``),
and samples are compared again in later ones.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from fulltilt.errors import DataError, UsageError
from fulltilt.feed.dataset_objects import Generators
from fulltilt.feed.epoch_order import spread
from fulltilt.feed.sample_layout import Layout, ShapeChanged, Unstorable, layout_of
from fulltilt.feed.sample_reader import Failure, Policy, failure_of, name_of, stopped_by
from fulltilt.feed.worker_pool import in_child_process

_SEEDS = (0x5EED0001, 0x0DDBA11, 0x1CEB00DA)
DECLARE = (
    "To have the part that is the same every time kept, declare the stages: "
    "feed.loader(dataset, decode=..., augment=...)."
)


@dataclass(frozen=True)
class Inspection:
    """The result. ``layout`` None: not tensors of one shape. ``declared``: deterministic by declaration."""

    layout: Layout | None
    random_because: str | None = None
    unstorable_because: str | None = None
    declared: bool = False


def inspect(dataset: Any, *, checks: int = 8, policy: Policy = "stop", workers: int = 0) -> Inspection:
    """Fetch a few samples, each several times under different seeds. Raises UsageError or DataError.

    With ``workers`` the samples are fetched in a child process.
    """
    samples = length_of(dataset)
    return in_child_process(lambda: _inspect(dataset, samples, checks, policy), workers, dataset)


def _inspect(dataset: Any, samples: int, checks: int, policy: Policy) -> Inspection:
    with Generators(dataset).untouched():
        drawn = _draw(dataset, samples, checks, policy)
        if policy == "skip":
            drawn = _of_one_layout(drawn)
        first = next(iter(drawn.values()))
        try:
            layout = layout_of(first)
        except Unstorable as error:
            _check_collates(first, str(error))
            return Inspection(None, unstorable_because=str(error))
        rows = {index: torch.zeros(layout.row_bytes, dtype=torch.uint8) for index in drawn}
        for index, sample in drawn.items():
            try:
                layout.pack(sample, rows[index])
            except (ShapeChanged, Unstorable) as error:
                raise stopped_by(Failure(index, "shape", str(error), name_of(dataset, index))) from None
        if getattr(dataset, "deterministic", False) is True or type(dataset) is torch.utils.data.TensorDataset:
            return Inspection(layout, declared=True)
        return Inspection(layout, random_because=_random_because(dataset, layout, rows))


def _random_because(dataset: Any, layout: Layout, rows: dict[int, torch.Tensor]) -> str | None:
    generators = Generators(dataset)  # including those that the first samples made
    with generators.untouched():
        for seed in _SEEDS:
            for index, row in rows.items():
                generators.seed(seed)
                marks = generators.marks()
                try:
                    sample = dataset[index]
                except Exception:
                    return f"sample {index} cannot be read a second time"
                if marks != generators.marks():
                    return f"sample {index} draws random numbers"
                if not layout.is_in(sample, row):
                    return f"sample {index} is different when it is read again"
    return None


def _check_collates(sample: Any, unstorable_because: str) -> None:
    try:
        torch.utils.data.default_collate([sample, sample])
    except Exception as error:
        raise UsageError(
            f"torch cannot make a batch of these samples: {unstorable_because}",
            "Return tensors, arrays and numbers alone. A DataLoader takes a collate_fn for others, fulltilt.train a "
            "Job(collate=...).",
        ) from error


def length_of(dataset: Any) -> int:
    """How many samples ``dataset`` has. Raises UsageError if it cannot be indexed, DataError if it is empty."""
    streams = isinstance(dataset, torch.utils.data.IterableDataset)
    if streams or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{type(dataset).__name__} has no length or cannot be indexed",
            "feed.loader needs a map-style data set (__len__ and __getitem__); keep the DataLoader for a stream.",
        )
    try:
        samples = len(dataset)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the length of {type(dataset).__name__} cannot be read: {error}") from error
    if samples == 0:
        raise DataError(f"the data set {type(dataset).__name__} is empty", "Check its path and its filters.")
    return samples


def _draw(dataset: Any, samples: int, checks: int, policy: Policy) -> dict[int, Any]:
    drawn: dict[int, Any] = {}
    last: Failure | None = None
    for index in spread(samples, max(checks, 2)):
        try:
            drawn[index] = dataset[index]
        except Exception as error:
            last = failure_of(dataset, index, error)
            if policy == "stop":
                raise stopped_by(last) from None  # the error holds its traceback
    if not drawn:
        assert last is not None
        raise stopped_by(last)
    return drawn


def _of_one_layout(drawn: dict[int, Any]) -> dict[int, Any]:
    """The samples of the majority's layout, as others are skipped later; all without a majority."""
    alike = defaultdict(list)
    for index, sample in drawn.items():
        with suppress(Unstorable):
            alike[layout_of(sample).describe()].append(index)
    most = max(alike.values(), key=len, default=[])
    return {index: drawn[index] for index in most} if 2 * len(most) > len(drawn) else drawn
