"""Samples that cannot be read: a worker hands on what went wrong instead of dying of it, and a policy decides."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fulltilt.errors import DataError
from fulltilt.feed.bad_samples import BadSamples
from fulltilt.feed.readers import Failure, name_of, one_line

log = logging.getLogger("fulltilt.train")

Collate = Callable[[list[Any]], Any]


class Fetched(NamedTuple):
    """A batch with holes: what is left of it (None when nothing is), and the samples that are not."""

    batch: Any
    failures: list[Failure]


def failed(samples: Any, index: int, error: Exception) -> Failure:
    """What is handed on in the place of sample ``index``."""
    name = name_of(samples, index) or getattr(error, "filename", None)
    return Failure(index, "corrupt", one_line(error), name and str(name), traceback.format_exc(limit=-6))


class CollateRest:
    """Collates what could be read. A batch without failures is what it always was."""

    def __init__(self, collate: Collate) -> None:
        self.collate = collate
        self.__qualname__ = getattr(collate, "__qualname__", type(collate).__name__)  # what a report calls it

    def __call__(self, samples: list[Any]) -> Any:
        """A batch, or a Fetched."""
        failures = [sample for sample in samples if isinstance(sample, Failure)]
        if not failures:
            return self.collate(samples)
        good = [sample for sample in samples if not isinstance(sample, Failure)]
        return Fetched(self.collate(good) if good else None, failures)


def without_failures(
    taken: list[Any], indices: list[torch.Tensor], bad: BadSamples
) -> tuple[list[Any], list[torch.Tensor]]:
    """The batches of a step as far as they could be read, and the samples in each.

    Names what is skipped; raises DataError as the policy says. A skipped sample keeps its place in the step: its batch
    weighs as much less as it is smaller.
    """
    if not any(isinstance(one, Fetched) for one in taken):
        return taken, indices
    failures = [failure for one in taken if isinstance(one, Fetched) for failure in one.failures]
    try:
        new = bad.note(failures)
    except DataError as error:
        raise error from RuntimeError(failures[0].trace)  # the log has the worker's own traceback
    for failure in new:
        log.warning("skipped %s: %s", failure.where(), failure.message)
    rest = [one.batch if isinstance(one, Fetched) else one for one in taken]
    left = [(batch, bad.without_bad(ids)) for batch, ids in zip(rest, indices, strict=True) if batch is not None]
    return [batch for batch, _ in left], [ids for _, ids in left]
