"""The samples of each batch, and the position of a loader: the same for any workers, tier and resume."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, Self, TypeVar

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from fulltilt.batch_observer import observed
from fulltilt.errors import UsageError
from fulltilt.feed.dataset_objects import Generators
from fulltilt.feed.random_numbers import as_int64, sample_seed

SAMPLE_BITS = 40
_SAMPLE = (1 << SAMPLE_BITS) - 1

Draws = TypeVar("Draws", torch.Tensor, int)


def numbered(batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """``batches`` of sample numbers as draws: the n-th draw of a sample has n in its high bits."""
    if not batches:
        return batches
    every = torch.cat(batches)
    if len(every) == 0 or _each_once(every):
        return batches
    # Stable, so that equal numbers stay in the order of their draws.
    ordered, places = torch.sort(every, stable=True)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    positions = torch.arange(len(ordered))
    times = positions - torch.cummax(positions * begins, 0).values
    draws = every.clone()
    draws[places] += times << SAMPLE_BITS
    return list(torch.split(draws, [len(batch) for batch in batches]))


def _each_once(samples: torch.Tensor) -> bool:
    """Whether no sample is among them twice, without sorting a hundred million."""
    there = torch.zeros(int(samples.max()) + 1, dtype=torch.bool)
    there[samples] = True
    return int(there.sum()) == len(samples)


def sample_of(draws: Draws) -> Draws:
    """The sample that each draw is of."""
    return draws & _SAMPLE


RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class BatchOrder(Protocol):
    """Decides on the samples of a loader's batches."""

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
    """The order of samples in every epoch.

    Without a sampler it is that of ``torch.utils.data.DistributedSampler`` with the same seed, so that a job can switch
    in mid-training; on one rank no sample is repeated.
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
        require("batch_size", self.batch_size, is_whole(self.batch_size, at_least=1), "a whole number of at least 1")
        object.__setattr__(self, "batch_size", int(self.batch_size))
        require("seed", self.seed, isinstance(self.seed, int), "a whole number")
        if self.sampler is not None and self.shuffle:
            raise UsageError("a sampler decides the order itself", "Leave out shuffle=True, or leave out the sampler.")

    def epoch_indices(self, epoch: int) -> torch.Tensor:
        """The indices that this rank draws in ``epoch``, as int64."""
        if self.sampler is not None:
            # torch's do not know their rank: with one seed, all ranks would draw the same samples.
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
        sampler: Any = self.sampler
        count = math.ceil(self.samples / self.world_size) if sampler is None else len(sampler)
        return count // self.batch_size if self.drop_last else math.ceil(count / self.batch_size)

    def share(self, indices: torch.Tensor) -> torch.Tensor:
        """This rank's part. All ranks get equally many, by repeating the first few: unequal ranks would hang DDP."""
        if self.world_size == 1:
            return indices
        total = math.ceil(len(indices) / self.world_size) * self.world_size
        repeats = math.ceil(total / max(len(indices), 1))
        return indices.repeat(repeats)[:total][self.rank :: self.world_size]


def draws_of(order: BatchOrder, epoch: int) -> list[torch.Tensor]:
    """The batches of ``epoch`` as draws; only a sampler can repeat samples."""
    batches = order.batches(epoch)
    return batches if isinstance(order, Order) and order.sampler is None else numbered(batches)


def _numbers(drawn: list[Any], samples: int) -> torch.Tensor:
    """What a sampler gave as int64. Raises UsageError for anything but numbers of samples."""
    try:
        indices = torch.tensor([int(number) for number in drawn], dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the sampler gives {str(drawn[0])[:60]}, not the number of a sample",
            "A sampler gives one sample after the other; batch_size cuts batches out of them.",
        ) from error
    wrong = indices[(indices < 0) | (indices >= samples)]
    if len(wrong):
        raise UsageError(f"the sampler asks for sample {int(wrong[0])} of a data set of {samples}")
    return indices


def _asked(sampler: Iterable[Any], seed: int, epoch: int, samples: int, apart: int = 0) -> list[Any]:
    """What ``sampler`` gives in ``epoch``; the same after a resume in the middle of it.

    Samplers draw from the global generators, which are seeded for it and restored.
    """
    if callable(set_epoch := getattr(sampler, "set_epoch", None)):
        set_epoch(epoch)
    generators = Generators(sampler)  # it may have one of its own
    most = max(2 * (len(sampler) if isinstance(sampler, Sized) else 0), 64 * samples + 100_000)
    try:
        with generators.untouched():
            generators.seed(sample_seed(seed, epoch, apart))
            given = list(itertools.islice(sampler, most + 1))
    except TypeError as error:
        raise UsageError(f"the sampler cannot be iterated: {error}") from error
    if len(given) > most:
        raise UsageError(
            f"the sampler does not end: it has given {most} for the {samples} samples there are",
            "Let its __iter__ end after as many as an epoch has.",
        )
    return given


def step_samples(order: BatchOrder) -> int | None:
    """Samples of a batch over all ranks; None where a sampler or trainer decides on them."""
    return order.batch_size * order.world_size if isinstance(order, Order) and order.sampler is None else None


def is_whole(number: Any, at_least: int = 0) -> bool:
    """Whether it is a whole number, of Python or NumPy, from ``at_least`` to 2**31."""
    return type(number) is not bool and isinstance(number, Integral) and at_least <= int(number) < 2**31


def require(name: str, given: Any, right: bool, expected: str) -> None:
    """Raise UsageError unless an argument is right: ``name is given; it must be expected``."""
    if not right:
        raise UsageError(f"{name} is {given!r}; it must be {expected}")


def spread(samples: int, count: int) -> Iterator[int]:
    """``count`` indices spread evenly over a data set, the first and the last among them."""
    count = min(count, samples)
    for number in range(count):
        yield number * (samples - 1) // max(count - 1, 1)


class PositionedLoader:
    """The base of the feed's loaders: their position, and closing them.

    ``_at`` is the epoch and number of the next batch, ``_next`` those with which the next pass begins.
    """

    def __init__(self) -> None:
        self._at = self._next = 0, 0
        self._positioned = False  # whether the next pass has been set
        self._sampler_epoch: int | None = None  # the sampler's in the last pass

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. By default it is the one after the last."""
        self.begin_at(epoch, 0)

    def begin_at(self, epoch: int, batch: int) -> None:
        """Begin the next iteration with batch number ``batch`` of ``epoch``. Raises UsageError."""
        self._at = self._next = position(epoch, batch)
        self._positioned = True

    def _begin(self, sampler: Any = None) -> tuple[int, int]:
        """Epoch and batch of a new pass: as set here, else by the sampler's set_epoch, else the next epoch."""
        epoch, start = self._next
        theirs: Any = getattr(sampler, "epoch", None)  # set by DistributedSampler.set_epoch
        was_set = callable(getattr(sampler, "set_epoch", None)) and is_whole(theirs) and theirs != self._sampler_epoch
        if was_set and not self._positioned:
            epoch, start = int(theirs), 0
        self._sampler_epoch, self._positioned = epoch, False
        self._next = epoch + 1, 0
        self._at = epoch, start
        return self._at

    def __iter__(self) -> Iterator[Any]:
        return observed(self, self._pass())

    def _pass(self) -> Iterator[Any]:
        raise NotImplementedError

    def close(self) -> None:
        """Free all memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def position(epoch: int, batch: int) -> tuple[int, int]:
    """Both as ints. Raises UsageError unless they are whole numbers of at least 0."""
    if not (is_whole(epoch) and is_whole(batch)):
        raise UsageError(f"batch {batch!r} of epoch {epoch!r}: both must be whole numbers of at least 0")
    return int(epoch), int(batch)


def saved_position(state: Mapping[str, Any]) -> tuple[int, int]:
    """Epoch and number of the next batch in a loader's ``state``. Raises UsageError for anything else."""
    if not isinstance(state, Mapping) or not {"epoch", "batch"} <= state.keys():
        raise UsageError("this is not the state of a loader: it has no epoch and batch")
    return position(state["epoch"], state["batch"])


def resumed_at(state: Mapping[str, Any], order: BatchOrder) -> tuple[int, int]:
    """Epoch and number of the next batch of ``order`` after a loader's ``state``. Raises UsageError."""
    epoch, batch = saved_position(state)
    if (seed := state.get("seed", order.seed)) != order.seed:
        raise UsageError(f"the saved loader had seed {seed}, this one has {order.seed}")
    saved, mine = state.get("step_samples"), step_samples(order)
    if not saved or not mine or saved == mine:
        return epoch, batch
    if batch * saved % mine:
        raise UsageError(
            f"the saved loader stands after {batch * saved} samples, in the middle of a batch of {mine}",
            "Resume with the same batch size and ranks, or restart the epoch with set_epoch.",
        )
    return epoch, batch * saved // mine


def ranks(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Rank and world size as given, else those of a running torch.distributed job; 0 and 1 without one.

    Raises UsageError for a rank that is not below the world size.
    """
    distributed = torch.distributed
    running = distributed.is_available() and distributed.is_initialized()
    found = (distributed.get_rank(), distributed.get_world_size()) if running else (0, 1)
    rank, world_size = found[0] if rank is None else rank, found[1] if world_size is None else world_size
    if not (is_whole(rank) and is_whole(world_size)):
        raise UsageError(f"rank is {rank!r} and world_size {world_size!r}; both must be whole numbers of at least 0")
    if rank >= world_size:
        raise UsageError(f"rank {rank} is not below world_size {world_size}")
    return rank, world_size
