"""The engine's data through the feed: decoded once, kept on the fastest tier with room, augmented on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fulltilt.errors import UsageError
from fulltilt.feed import FeedLoader
from fulltilt.feed.augment import Augmentation, as_augmentation
from fulltilt.feed.bad_samples import BadSamples, ShapesDiffer
from fulltilt.feed.handles import shared_handle
from fulltilt.feed.inspection import inspect
from fulltilt.feed.places import home_of
from fulltilt.feed.residency import Residence
from fulltilt.train.distributed import Ranks, part_of
from fulltilt.train.sampler import EpochPlan
from fulltilt.train.sources import BatchSource, LoaderSettings, MapSource, Source, StepData, WorkerStart, listed


def source(
    data: Any,
    plan: EpochPlan,
    loading: LoaderSettings,
    collate: Callable[[list[Any]], Any] | None = None,
    augment: Any = None,
) -> Source:
    """The source for a data set or iterable; ``plan`` has the sizes, without its number of samples."""
    on_device = as_augmentation(augment)
    streams = isinstance(data, torch.utils.data.IterableDataset)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not streams:
        if len(data) == 0:
            raise UsageError("the data set is empty")
        if loading.workers and (held := shared_handle(data)) is not None:
            raise UsageError(
                f"the data set {type(data).__name__} holds an open {held} that {loading.workers} workers would share",
                "Open it in __getitem__, once in each process, or set workers: 0.",
            )
        plan = replace(plan, samples=len(data))
        # Only the feed finishes batches on the device, for data sets that leave that to it.
        through_feed = loading.residency != "none" or getattr(data, "finishes_on_device", False)
        fed = _fed(data, plan, loading, on_device) if through_feed and collate is None else None
        return fed or MapSource(data, plan, loading, collate, on_device)
    if streams:
        raise UsageError(
            "an IterableDataset does not say whether it gives samples or batches",
            "Give DataLoader(data, batch_size=…) for samples, or DataLoader(data, batch_size=None) for ready batches.",
        )
    if hasattr(data, "__iter__"):
        if on_device is not None:
            raise UsageError(
                "ready batches do not say which samples are in them, which augmentation goes by",
                "Give the data set itself as data, or the augmentation to feed.loader(..., augment=...).",
            )
        return BatchSource(data, plan.accumulation, plan.world)
    raise UsageError(f"data of type {type(data).__name__} is neither a data set nor an iterable of batches")


class PlannedOrder:
    """An epoch plan as the feed asks for it: this rank's micro-batches of the steps that are left."""

    def __init__(self, plan: EpochPlan) -> None:
        self.plan = plan
        self.permutation = plan.order()

    @property
    def batch_size(self) -> int:
        """Samples of the largest micro-batch on a rank."""
        return -(-self.plan.batch_size // self.plan.world)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.plan.seed

    def batches(self, epoch: int) -> list[torch.Tensor]:
        """The sample numbers of each micro-batch; the plan is of this ``epoch`` alone."""
        assert epoch == self.plan.epoch
        shares = [share for step in range(self.plan.steps) for share in self.plan.shares(step)]
        return [self.permutation[low:high] for low, high in shares]

    def batches_per_epoch(self) -> int:
        """How many micro-batches this rank has."""
        return sum(len(self.plan.shares(step)) for step in range(self.plan.steps))


class FeedSource:
    """A map-style data set behind the feed: the batches of MapSource, already on the device."""

    def __init__(self, loader: FeedLoader, plan: EpochPlan) -> None:
        self.loader, self.plan = loader, plan

    def steps(self, epoch: int, consumed: int) -> Iterator[StepData]:
        """See Source. ``consumed`` counts samples over all ranks; a skipped sample counts as used."""
        plan = replace(self.plan, epoch=epoch, start=consumed)
        order = PlannedOrder(plan)
        self.loader.regroup(order)
        self.loader.set_epoch(epoch)
        drawn = iter(self.loader)
        try:
            for step in range(plan.steps):
                first, end = plan.span(step)
                taken = [next(drawn) for _ in plan.shares(step)]
                if step == plan.steps - 1:
                    next(drawn, None)  # lets the feed end its epoch: nobody may ask for more after the last step
                ids = order.permutation[first:end]
                yield StepData(taken, end - first, end, partial(listed, ids))
        finally:
            drawn.close()  # type: ignore[attr-defined]

    def steps_per_epoch(self) -> int:
        """See Source."""
        return self.plan.steps

    def steps_done(self, consumed: int) -> int:
        """See Source."""
        return consumed // self.plan.step_samples

    def resized(self, batch_size: int, accumulation: int) -> FeedSource:
        """See Source. What the feed keeps stays kept."""
        return FeedSource(self.loader, replace(self.plan, batch_size=batch_size, accumulation=accumulation))

    def close(self) -> None:
        """See Source."""
        self.loader.close()


def _fed(data: Any, plan: EpochPlan, loading: LoaderSettings, augment: Augmentation | None) -> FeedSource | None:
    """The data set behind the feed; None for samples that are no fixed-shape tensors and need the worker path."""
    order = PlannedOrder(plan)
    try:
        found = inspect(data, policy=loading.on_bad_sample, workers=loading.workers)
    except ShapesDiffer:
        if order.batch_size > 1:
            raise
        return None  # one sample a batch: nothing has to fit together
    if found.layout is None:
        if loading.residency != "auto":
            raise UsageError(
                f"the data set cannot be kept in {loading.residency}: {found.unstorable_because}",
                "Use residency: auto or none, or return tensors of one shape.",
            )
        return None
    home = home_of(data, loading.device)
    loader = FeedLoader(
        data,
        order,
        found,
        augment=augment,
        residence=Residence(data, found, loading.residency, home, None, None, None, checks=8),
        device=loading.device,
        workers=part_of(loading.workers, Ranks(plan.rank, plan.world)),
        collate_fn=None,
        bad=BadSamples(len(data), loading.on_bad_sample, loading.max_bad_share),
        on_worker_start=WorkerStart(loading.stack_log),
    )
    return FeedSource(loader, plan)
