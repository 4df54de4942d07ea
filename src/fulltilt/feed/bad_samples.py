"""What happens to samples that cannot be served: the job stops, or they are skipped up to a stated share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from fulltilt.errors import DataError
from fulltilt.feed.readers import Failure
from fulltilt.feed.repeats import sample_of

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
