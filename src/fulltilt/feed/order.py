"""Which samples make up which batch: the same answer for every worker count, tier and resume point."""

from __future__ import annotations

import array
import itertools
import math
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from fulltilt.errors import UsageError
from fulltilt.feed.draws import as_int64, sample_seed
from fulltilt.feed.generators import Generators
from fulltilt.feed.places import ranks
from fulltilt.feed.repeats import numbered

RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class BatchOrder(Protocol):
    """What a loader asks for the samples of its batches."""

    @property
    def batch_size(self) -> int:
        """Samples of the largest batch on this rank."""

    @property
    def seed(self) -> int:
        """The seed of everything random about a sample."""

    def batches(self, epoch: int) -> list[torch.Tensor]:
        """The sample numbers of each batch of ``epoch``, as int64."""

    def batches_per_epoch(self) -> int:
        """How many batches an epoch has on this rank."""


@dataclass(frozen=True)
class Order:
    """The plan from which every epoch's batches follow.

    Without a sampler the order is that of ``torch.utils.data.DistributedSampler`` with the same seed, so that
    a job can change over in mid-training; on one rank no sample is repeated.
    """

    samples: int
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    sampler: Iterable[int] | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.batch_size, at_least=1):
            raise UsageError(f"batch_size is {self.batch_size!r}; it must be a whole number of at least 1")
        object.__setattr__(self, "batch_size", int(self.batch_size))
        if not isinstance(self.seed, int):
            raise UsageError(f"seed is {self.seed!r}; it must be a whole number")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} is not below world_size {self.world_size}")
        if self.sampler is not None and self.shuffle:
            raise UsageError("a sampler decides the order itself", "Leave out shuffle=True, or leave out the sampler.")

    def epoch_indices(self, epoch: int) -> torch.Tensor:
        """The indices that this rank draws in ``epoch``, as int64."""
        if self.sampler is not None:
            # Those of torch know of no ranks: from one seed, all ranks would draw the same samples.
            apart = self.rank if type(self.sampler) in RANDOM_SAMPLERS else 0
            return _numbers(_asked(self.sampler, self.seed, epoch, self.samples, apart), self.samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(as_int64(self.seed + epoch))
            indices = torch.randperm(self.samples, generator=generator)
        else:
            indices = torch.arange(self.samples)
        return self.share(indices)

    def batches(self, epoch: int) -> list[torch.Tensor]:
        """The batches of ``epoch``: slices of its indices."""
        indices = self.epoch_indices(epoch)
        stop = len(indices) // self.batch_size * self.batch_size if self.drop_last else len(indices)
        return list(torch.split(indices[:stop], self.batch_size)) if stop else []

    def batches_per_epoch(self) -> int:
        """How many batches an epoch has on this rank. Raises TypeError for a sampler without a length."""
        count = self._length()
        return count // self.batch_size if self.drop_last else math.ceil(count / self.batch_size)

    def _length(self) -> int:
        if self.sampler is not None:
            return len(self.sampler)  # type: ignore[arg-type]
        return math.ceil(self.samples / self.world_size)

    def share(self, indices: torch.Tensor) -> torch.Tensor:
        """This rank's part. Every rank gets equally many, by repeating the first few: unequal ranks would hang DDP."""
        if self.world_size == 1:
            return indices
        total = math.ceil(len(indices) / self.world_size) * self.world_size
        repeats = math.ceil(total / max(len(indices), 1))
        return indices.repeat(repeats)[:total][self.rank :: self.world_size]


@dataclass(frozen=True)
class GivenBatches:
    """The batches that a batch sampler gives, as it gives them; ``batch_size`` is what it says of itself, or 1."""

    samples: int
    batch_sampler: Iterable[Iterable[int]]
    seed: int = 0

    @property
    def batch_size(self) -> int:
        """Samples of a batch, as far as it is known beforehand."""
        size = getattr(self.batch_sampler, "batch_size", 1)
        return size if isinstance(size, int) else 1

    def batches(self, epoch: int) -> list[torch.Tensor]:
        """The batches of ``epoch``."""
        given = _asked(self.batch_sampler, self.seed, epoch, self.samples)
        try:
            return [_numbers(list(batch), self.samples) for batch in given]
        except TypeError as error:
            raise UsageError(
                f"the batch sampler gives {str(given[0])[:60]}, not a list of samples",
                "A sampler that gives one sample after the other goes in as sampler=...",
            ) from error

    def batches_per_epoch(self) -> int:
        """How many batches an epoch has. Raises TypeError for a batch sampler without a length."""
        return len(self.batch_sampler)  # type: ignore[arg-type]


def draws_of(order: BatchOrder, epoch: int) -> list[torch.Tensor]:
    """The batches of ``epoch`` as draws (``repeats.py``); only a sampler can repeat samples, others cost nothing."""
    batches = order.batches(epoch)
    return batches if isinstance(order, Order) and order.sampler is None else numbered(batches)


def _numbers(drawn: list[Any], samples: int) -> torch.Tensor:
    """What a sampler gave as int64. Raises UsageError for anything but numbers of samples."""
    try:
        indices = _int64(drawn)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the sampler gives {str(drawn[0])[:60]}, not the number of a sample",
            "A sampler that gives whole batches goes in as batch_sampler=...",
        ) from error
    wrong = indices[(indices < 0) | (indices >= samples)]
    if len(wrong):
        raise UsageError(f"the sampler asks for sample {int(wrong[0])} of a data set of {samples}")
    return indices


def _int64(drawn: list[Any]) -> torch.Tensor:
    try:
        numbers = array.array("q", drawn)  # a seventh of the time that torch takes for a list
    except (TypeError, OverflowError):  # not all of them are whole numbers by themselves
        return torch.tensor([int(number) for number in drawn], dtype=torch.int64)
    return torch.frombuffer(numbers, dtype=torch.int64) if drawn else torch.empty(0, dtype=torch.int64)


def _asked(sampler: Iterable[Any], seed: int, epoch: int, samples: int, apart: int = 0) -> list[Any]:
    """What ``sampler`` gives in ``epoch``: the same again for a run that goes on in the middle of it.

    Samplers draw from the global generators, which stand elsewhere by then: they are set for it, and put back.
    """
    tell = getattr(sampler, "set_epoch", None)
    if callable(tell):
        tell(epoch)
    generators = Generators()
    with generators.untouched():
        generators.seed(sample_seed(seed, epoch, apart))
        return _all_of(sampler, samples)


def _all_of(sampler: Iterable[Any], samples: int) -> list[Any]:
    length = len(sampler) if isinstance(sampler, Sized) else 0
    most = max(2 * length, 64 * samples + 100_000)
    try:
        given = list(itertools.islice(sampler, most + 1))
    except TypeError as error:
        raise UsageError(f"the sampler cannot be asked for samples: {error}") from error
    if len(given) > most:
        raise UsageError(
            f"the sampler does not end: it has given {most} for the {samples} samples there are",
            "Let its __iter__ end after as many as an epoch has.",
        )
    return given


def step_samples(order: BatchOrder) -> int | None:
    """Samples of a batch on all ranks together; None where somebody else decides on the batches."""
    return order.batch_size * order.world_size if isinstance(order, Order) and order.sampler is None else None


def is_whole(number: Any, at_least: int = 0) -> bool:
    """Whether it is a whole number (NumPy has some of its own) of ``at_least`` so many."""
    return type(number) is not bool and isinstance(number, Integral) and int(number) >= at_least


def sampler_of(order: BatchOrder) -> Any:
    """What the user has given to decide on the samples or batches; None without one."""
    sampler = getattr(order, "sampler", None)
    return getattr(order, "batch_sampler", None) if sampler is None else sampler


def every_batch_counts(order: BatchOrder) -> bool:
    """Whether somebody waits for each batch: other ranks, or a trainer that made the order itself."""
    if isinstance(order, Order):
        return order.world_size > 1
    return not isinstance(order, GivenBatches) or ranks()[1] > 1


def spread(samples: int, count: int) -> Iterator[int]:
    """``count`` indices spread evenly over a data set, the first and the last among them."""
    count = min(count, samples)
    if count == 1:
        yield 0
    for number in range(count if count > 1 else 0):
        yield number * (samples - 1) // (count - 1)
