"""A first look at a data set: what a sample is made of, whether it is the same every time, and where it can be cut."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from fulltilt.errors import DataError, UsageError
from fulltilt.feed.apart import apart
from fulltilt.feed.bad_samples import TO_ONE_SHAPE, Policy, ShapesDiffer, stopped_by
from fulltilt.feed.generators import Generators
from fulltilt.feed.leaves import Unstorable
from fulltilt.feed.opened import files_opened
from fulltilt.feed.order import spread
from fulltilt.feed.randomness import counting_reason, first_reason
from fulltilt.feed.readers import Failure, failure_of, name_of
from fulltilt.feed.splitting import Split, find_split
from fulltilt.feed.structure import Layout, ShapeChanged, layout_of
from fulltilt.feed.untouched import untouched


@dataclass(frozen=True)
class Inspection:
    """What was found. ``layout`` None: served by a stock DataLoader. ``kept`` is the layout before the cut.

    ``opened`` are the files that the samples drawn were read from.
    """

    layout: Layout | None
    random_because: str | None = None
    unstorable_because: str | None = None
    split: Split | None = None
    kept: Layout | None = None
    opened: frozenset[str] = frozenset()


def inspect(dataset: Any, *, checks: int = 8, policy: Policy = "stop", workers: int = 0) -> Inspection:
    """Draw a few samples, each twice under different seeds. Raises UsageError or DataError.

    ``workers``: how many will run the data set. If any, they are drawn in a process of its own too (``apart.py``).
    """
    samples = length_of(dataset)
    found = apart(lambda: _look(dataset, samples, checks, policy), workers, dataset)
    if found.split is not None:
        found.split.find_in(dataset)
    return found


def _look(dataset: Any, samples: int, checks: int, policy: Policy) -> Inspection:
    generators = Generators(dataset)
    with untouched(dataset, generators):
        with files_opened() as opened:
            drawn = _draw(dataset, samples, checks, policy)
        if policy == "skip":
            drawn = _of_one_layout(drawn)
        indices = list(drawn)
        try:
            layout = layout_of(drawn[indices[0]])
        except Unstorable as error:
            _check_collates(drawn[indices[0]], str(error))
            return Inspection(None, unstorable_because=str(error))
        _check_shapes(dataset, drawn, layout)
        generators = Generators(dataset)  # with those that the first samples have made
        random_because = first_reason(lambda index: dataset[index], indices, generators)
        random_because = random_because or counting_reason(lambda index: dataset[index], indices[0], generators)
        if random_because is None:
            return Inspection(layout, opened=frozenset(opened))
        split = find_split(dataset, indices, generators)
        if split is None:
            return Inspection(layout, random_because)
        kept = layout_of(split.draw(dataset, indices[0])[0])
        return Inspection(layout, random_because, split=split, kept=kept)


def _check_collates(sample: Any, unstorable_because: str) -> None:
    try:
        torch.utils.data.default_collate([sample, sample])
    except Exception as error:
        raise UsageError(
            f"torch cannot make a batch of these samples: {unstorable_because}", "Give a collate_fn that can."
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
        raise UsageError(f"the length of {type(dataset).__name__} is not to be had: {error}") from error
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
                raise stopped_by(last) from None  # its own traceback stands in the error
    if not drawn:
        assert last is not None
        raise stopped_by(last)
    return drawn


def _of_one_layout(drawn: dict[int, Any]) -> dict[int, Any]:
    """Those of the layout that most have: the others are skipped when they are read. All, where most have none."""
    alike = defaultdict(list)
    for index, sample in drawn.items():
        with suppress(Unstorable):
            alike[layout_of(sample).describe()].append(index)
    most = max(alike.values(), key=len, default=[])
    return {index: drawn[index] for index in most} if 2 * len(most) > len(drawn) else drawn


def _check_shapes(dataset: Any, drawn: dict[int, Any], layout: Layout) -> None:
    first = next(iter(drawn))
    row = torch.zeros(layout.row_bytes, dtype=torch.uint8)
    for index, sample in drawn.items():
        try:
            layout.pack(sample, row)
            continue
        except ShapeChanged:
            found = layout_of(sample).describe()
        except Unstorable as error:
            found = str(error)
        name = name_of(dataset, index)
        raise ShapesDiffer(
            f"samples differ in shape: sample {first} is {layout.describe()}, "
            f"sample {index}{f' ({name})' if name else ''} is {found}",
            TO_ONE_SHAPE,
        )
