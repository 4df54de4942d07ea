"""The samples of each step on each rank: pure functions of seed, epoch and position.

Batches are global: a step takes the next ``batch_size × accumulation`` samples of the epoch's permutation for any
number of ranks, which divide each of its micro-batches. Every sample is used exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fulltilt.feed.random_numbers import mix


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The steps of one epoch from position ``start`` of its permutation on, for one rank."""

    samples: int
    batch_size: int
    accumulation: int = 1
    start: int = 0
    seed: int = 0
    epoch: int = 0
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True
    drop_last: bool = False

    @property
    def step_samples(self) -> int:
        """The samples of a full step, over all ranks."""
        return self.batch_size * self.accumulation

    @property
    def steps(self) -> int:
        """The optimizer steps left in the epoch."""
        left = max(self.samples - self.start, 0)
        return left // self.step_samples if self.drop_last else -(-left // self.step_samples)

    def span(self, step: int) -> tuple[int, int]:
        """A step's positions in the permutation, from and to; the last step may be shorter."""
        first = self.start + step * self.step_samples
        return first, min(first + self.step_samples, self.samples)

    def shares(self, step: int) -> list[tuple[int, int]]:
        """This rank's part of each micro-batch of a step, as positions. Parts differ by at most one; none is empty."""
        first, end = self.span(step)
        shares = []
        for begin in range(first, end, self.batch_size):
            size = min(self.batch_size, end - begin)
            low, high = (begin + size * r // self.world_size for r in (self.rank, self.rank + 1))
            if high > low:
                shares.append((low, high))
        return shares

    def all_shares(self) -> list[tuple[int, int]]:
        """This rank's micro-batches of all steps left."""
        return [share for step in range(self.steps) for share in self.shares(step)]

    def order(self) -> torch.Tensor:
        """The epoch's permutation of sample indices, the same on every rank."""
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        return torch.randperm(self.samples, generator=generator)


class RankBatches:
    """This rank's micro-batches of a plan, as the order of the feed and the batch sampler of a DataLoader.

    A DataLoader's workers live as long as the run: it gets ``(epoch, index)`` pairs, and ``begin`` takes the plan of
    the next epoch.
    """

    def __init__(self, plan: EpochPlan) -> None:
        self.begin(plan)

    def begin(self, plan: EpochPlan) -> None:
        """Take another plan from the next ``iter`` on."""
        self.plan, self.seed, self.order = plan, plan.seed, plan.order()
        self.batch_size = -(-plan.batch_size // plan.world_size)  # samples of a full micro-batch on a rank

    def batches(self, epoch: int) -> list[torch.Tensor]:
        """The sample numbers of each micro-batch; ``epoch`` has to be the plan's."""
        assert epoch == self.plan.epoch
        return [self.order[low:high] for low, high in self.plan.all_shares()]

    def batches_per_epoch(self) -> int:
        """The number of micro-batches of this rank."""
        return len(self.plan.all_shares())

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices in self.batches(self.plan.epoch):
            yield [(self.plan.epoch, index) for index in indices.tolist()]

    def __len__(self) -> int:
        return self.batches_per_epoch()
