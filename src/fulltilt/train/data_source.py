"""The source of a step's batches: the feed, a DataLoader over a map-style data set, or ready batches."""

from __future__ import annotations

import copy
import itertools
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fulltilt.errors import UsageError
from fulltilt.feed.augment import Augmentation, as_augmentation
from fulltilt.feed.dataset_check import inspect
from fulltilt.feed.dataset_objects import Generators, generators_of_samples, refuse_shared_handle
from fulltilt.feed.loader import FeedLoader
from fulltilt.feed.random_numbers import mix, sample_seed
from fulltilt.feed.sample_cache import SampleCache
from fulltilt.feed.sample_layout import container_like
from fulltilt.feed.sample_reader import BadSamples, Failure, ShapesDiffer, failure_of
from fulltilt.figures import listed
from fulltilt.recorder.loaders.batches import count_samples
from fulltilt.train.config import TrainSettings
from fulltilt.train.distributed import Piece, RankInfo, part_of
from fulltilt.train.guards import explain_dead_worker
from fulltilt.train.sampler import EpochPlan, RankBatches
from fulltilt.train.stop import listen_in_worker


def samples_in_batch(batch: Any) -> int:
    """The number of samples, counted as in recorded runs. Raises UsageError where the batch does not show it."""
    found = count_samples(batch, batched=True)
    if found is None:
        raise UsageError(f"cannot tell how many samples a batch of type {type(batch).__name__} has")
    return found


def split_batch(batch: Any, total: int, most: int | None) -> Iterator[Piece]:
    """The batch of ``total`` samples in parts of at most ``most``, each with its number of samples."""
    if most is None or total <= most:
        yield batch, total
        return

    def cut(node: Any, first: int, end: int) -> Any:
        if isinstance(node, torch.Tensor):
            return node[first:end] if node.ndim and node.shape[0] == total else node
        if not isinstance(node, list | tuple) or hasattr(node, "_fields") or len(node) != total:
            return None
        columns = any(count_samples(one, total, batched=True) == total for one in node)
        return None if columns else node[first:end]

    for first in range(0, total, most):
        end = min(first + most, total)
        yield _rebuilt(batch, partial(cut, first=first, end=end)), end - first


def to_device(batch: Any, device: torch.device, memory_format: torch.memory_format | None = None) -> Any:
    """The batch on ``device``, without waiting for copies from pinned memory; images in ``memory_format``.

    An object with ``to(device)`` (a packed sequence) moves itself.
    """

    def move(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            moved = node.to(device, non_blocking=True)
            image = memory_format is not None and node.ndim == 4 and node.is_floating_point()
            return moved.to(memory_format=memory_format) if image else moved
        itself = getattr(node, "to", None)
        return itself(device) if callable(itself) and not isinstance(node, Mapping | type) else None

    return _rebuilt(batch, move)


def _rebuilt(node: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with each part replaced by what ``change`` returns; None means to look inside the part."""
    if (changed := change(node)) is not None:
        return changed
    if not isinstance(node, Mapping | list | tuple):
        return node
    children = node.values() if isinstance(node, Mapping) else node
    return container_like(node, [_rebuilt(child, change) for child in children])


# --------------------------------------------------------------------------- rows of all ranks


def counts_of_all(count: int) -> list[int]:
    """Every rank's ``count``, exchanged between the hosts; no GPU is waited for."""
    mine = torch.tensor([count])
    counts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, mine)
    return [int(each) for each in counts]


def rows_of_all(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The rows of all ranks, ``counts[rank]`` of each. Gradients flow to this rank's rows only."""
    most, rank = max(counts), dist.get_rank()
    padded = rows.detach().new_zeros(most, *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    parts = [part[:count] for part, count in zip(gathered, counts, strict=True)]
    parts[rank] = rows
    return torch.cat(parts)


# --------------------------------------------------------------------------- samples that cannot be read


log = logging.getLogger("fulltilt.train")

Collate = Callable[[list[Any]], Any]
CPU = torch.device("cpu")


class PartialBatch(NamedTuple):
    """What could be read of a batch (None for nothing), and the samples that could not."""

    batch: Any
    failures: list[Failure]


class CollateReadable:
    """Collates the samples that could be read."""

    def __init__(self, collate: Collate) -> None:
        self.collate = collate
        self.__qualname__ = getattr(collate, "__qualname__", type(collate).__name__)  # shown in reports

    def __call__(self, samples: list[Any]) -> Any:
        """A batch, or a PartialBatch where samples failed."""
        failures = [sample for sample in samples if isinstance(sample, Failure)]
        if not failures:
            return self.collate(samples)
        good = [sample for sample in samples if not isinstance(sample, Failure)]
        return PartialBatch(self.collate(good) if good else None, failures)


# --------------------------------------------------------------------------- sources


@dataclass(frozen=True, slots=True)
class StepData:
    """The batches of one step on this rank, each with its number of samples.

    ``samples`` counts all ranks; ``consumed`` is the position in the epoch after the step.
    """

    batches: list[Piece]
    samples: int
    consumed: int
    names: Callable[[], str]


class SeededSamples(torch.utils.data.Dataset[Any]):
    """A data set whose random numbers depend on (seed, epoch, index) only, not on workers, ranks or resumes."""

    def __init__(self, samples: Any, seed: int) -> None:
        self.samples = samples
        self.seed = seed
        self._generators: Generators | None = None

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        if self._generators is None:
            self._generators = generators_of_samples(self.samples, index)
        with self._generators.untouched():
            self._generators.seed(sample_seed(self.seed, epoch, index))
            try:
                return self.samples[index]
            except MemoryError:
                raise  # not the sample's fault
            except Exception as error:
                return failure_of(self.samples, index, error)


class PlannedSource:
    """Steps of an EpochPlan. ``consumed`` counts samples over all ranks, also skipped ones."""

    def __init__(self, plan: EpochPlan) -> None:
        self.plan = plan
        self.batches = RankBatches(plan)  # of the epoch under way

    def _read(self, plan: EpochPlan) -> Iterator[Piece | None]:
        """This rank's ``batches`` as pieces; None where no sample could be read."""
        raise NotImplementedError

    def steps(self, epoch: int, consumed: int) -> Iterator[StepData]:
        """The steps left in ``epoch`` after ``consumed`` samples or ready batches."""
        plan = replace(self.plan, epoch=epoch, start=consumed)
        self.batches.begin(plan)
        drawn = self._read(plan)
        for step in range(plan.steps):
            first, end = plan.span(step)
            taken = [next(drawn) for _ in plan.shares(step)]
            names = partial(sample_names, self.batches.order[first:end])
            yield StepData([piece for piece in taken if piece is not None], end - first, end, names)

    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch."""
        return self.plan.steps

    def steps_done(self, consumed: int) -> int:
        """How many steps of an epoch ``consumed`` makes."""
        return consumed // self.plan.step_samples

    def resize(self, batch_size: int) -> None:
        """Change the batch size, from the next call of ``steps`` on."""
        self.plan = replace(self.plan, batch_size=batch_size)

    def close(self) -> None:
        """End the workers."""


class MapSource(PlannedSource):
    """A map-style data set read through a DataLoader whose workers live as long as the run."""

    def __init__(
        self,
        samples: Any,
        plan: EpochPlan,
        settings: TrainSettings,
        collate: Collate | None = None,
        augment: Augmentation | None = None,
        *,
        device: torch.device = CPU,
        stack_log: Path | None = None,
    ) -> None:
        super().__init__(plan)
        self.device, self.augment = device, augment
        self._bad = BadSamples(len(samples), settings.on_bad_sample, settings.max_bad_share)
        count = part_of(settings.workers, RankInfo(plan.rank, plan.world_size))
        self._generator = torch.Generator()
        self._loader = torch.utils.data.DataLoader(
            SeededSamples(samples, plan.seed),
            batch_sampler=self.batches,
            collate_fn=CollateReadable(collate or torch.utils.data.default_collate),
            num_workers=count,
            prefetch_factor=settings.prefetch if count else None,
            persistent_workers=count > 0,
            pin_memory=device.type == "cuda",
            worker_init_fn=partial(start_worker, stack_log) if count else None,
            generator=self._generator,  # the loader's own draws must not move the run's random state
        )

    def _read(self, plan: EpochPlan) -> Iterator[Piece | None]:
        self._generator.manual_seed(mix(plan.seed, plan.epoch))
        drawn = iter(self._loader)
        for low, high in plan.all_shares():
            try:
                batch = next(drawn)
            except (RuntimeError, OSError, EOFError) as error:
                explained = explain_dead_worker(error, getattr(drawn, "_workers", ()))
                if explained is None:
                    raise
                raise explained from error
            ids = self.batches.order[low:high]
            if isinstance(batch, PartialBatch):
                for failure in self._bad.note(batch.failures):
                    log.warning("skipped %s: %s", failure.where(), failure.message)
                failed = torch.tensor([failure.index for failure in batch.failures])
                batch, ids = batch.batch, ids[~torch.isin(ids, failed)]
            if self.augment is not None and batch is not None:
                batch = self.augment(to_device(batch, self.device), plan.seed, plan.epoch, ids.to(self.device))
            yield None if batch is None else (batch, len(ids))

    def close(self) -> None:
        """See PlannedSource. By themselves the workers would notice our end only after up to five seconds."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            for worker in getattr(iterator, "_workers", ()):
                worker.kill()  # a worker ignores SIGTERM, see start_worker


class BatchSource:
    """Ready batches from any iterable. A resume draws and drops the used batches, if the iterable cannot skip them."""

    def __init__(self, iterable: Any, accumulation: int, world_size: int) -> None:
        self.iterable, self.accumulation, self.world_size = iterable, accumulation, world_size

    def steps(self, epoch: int, consumed: int) -> Iterator[StepData]:
        """See PlannedSource. ``consumed`` counts batches of this rank."""
        positioned = hasattr(self.iterable, "begin_at")  # a loader of the feed
        if positioned:
            self.iterable.begin_at(epoch, consumed)
        else:
            samplers = (getattr(self.iterable, name, None) for name in ("sampler", "batch_sampler"))
            for shuffled in (self.iterable, *samplers):
                if hasattr(shuffled, "set_epoch"):
                    shuffled.set_epoch(epoch)
        drawn = iter(self.iterable)
        for _ in range(0 if positioned else consumed):
            next(drawn, None)
        while True:
            batches = itertools.islice(drawn, self.accumulation)
            taken = [(batch, samples_in_batch(batch)) for batch in batches]
            samples = sum(count for _, count in taken)
            if self.world_size > 1:  # a rank without batches takes part until all are done
                samples = sum(counts_of_all(samples))
            if not samples:
                return
            # From one, as in the progress bar.
            numbers = f"es {consumed + 1} to {consumed + len(taken)}" if len(taken) > 1 else f" {consumed + 1}"
            span = f"batch{numbers} of epoch {epoch + 1}"
            consumed += len(taken)
            yield StepData(taken, samples, consumed, lambda span=span: span)  # type: ignore[misc]

    def steps_per_epoch(self) -> int | None:
        """Steps of a whole epoch, or None if nobody knows."""
        try:
            return -(-len(self.iterable) // self.accumulation)
        except TypeError:
            return None

    def steps_done(self, consumed: int) -> int:
        """See PlannedSource."""
        return consumed // self.accumulation

    def resize(self, batch_size: int) -> None:
        """See PlannedSource. Ready batches keep their size."""

    def close(self) -> None:
        """See PlannedSource. The iterable is not ours to close."""


Source = PlannedSource | BatchSource


def start_worker(stack_log: Path | None, _worker: int = 0) -> None:
    """Prepare a worker: ignore signals, and write the stack to ``stack_log`` when asked.

    Slurm and torchrun send SIGTERM to all processes of a job; the parent needs its workers for one more step.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # An empty handler, not SIG_IGN, which programs that a data set starts would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if stack_log is not None:
        listen_in_worker(stack_log)


def sample_names(ids: torch.Tensor) -> str:
    """``samples 3, 7, 12 and 20 more``."""
    return f"samples {listed([*map(str, ids.tolist())], 16)}"


# --------------------------------------------------------------------------- choosing


def make_source(
    data: Any,
    plan: EpochPlan,
    settings: TrainSettings,
    collate: Collate | None = None,
    augment: Any = None,
    *,
    device: torch.device = CPU,
    stack_log: Path | None = None,
) -> Source:
    """The source for a data set or iterable; the number of samples in ``plan`` is filled in. Raises UsageError."""
    on_device = as_augmentation(augment)
    if isinstance(data, torch.utils.data.IterableDataset):
        raise UsageError(
            "an IterableDataset does not say whether it gives samples or batches",
            "Give DataLoader(data, batch_size=…) for samples, or DataLoader(data, batch_size=None) for ready batches.",
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if len(data) == 0:
            raise UsageError("the data set is empty")
        refuse_shared_handle(data, settings.workers)
        plan = replace(plan, samples=len(data))
        through_feed = settings.residency != "none" and collate is None
        fed = _fed(data, plan, settings, on_device, device, stack_log) if through_feed else None
        return fed or MapSource(data, plan, settings, collate, on_device, device=device, stack_log=stack_log)
    if hasattr(data, "__iter__"):
        if on_device is not None:
            raise UsageError(
                "augment needs the numbers of the samples, which ready batches do not have",
                "Give the data set itself as data, or the augmentation to feed.loader(..., augment=...).",
            )
        return BatchSource(data, plan.accumulation, plan.world_size)
    raise UsageError(f"data of type {type(data).__name__} is neither a data set nor an iterable of batches")


class FeedSource(PlannedSource):
    """A map-style data set read through the feed: the batches of MapSource, already on the device."""

    def __init__(self, loader: FeedLoader, plan: EpochPlan) -> None:
        super().__init__(plan)
        self.loader = loader

    def _read(self, plan: EpochPlan) -> Iterator[Piece | None]:
        self.loader.regroup(copy.copy(self.batches))  # the loader compares its batch size with that of the one before
        self.loader.set_epoch(plan.epoch)
        drawn = iter(self.loader)
        try:
            for left in reversed(range(len(self.batches))):
                batch = next(drawn)
                if not left:
                    next(drawn, None)  # lets the feed end its epoch
                yield None if batch is None else (batch, samples_in_batch(batch))
        finally:
            drawn.close()  # type: ignore[attr-defined]

    def close(self) -> None:
        """See PlannedSource."""
        self.loader.close()


def _fed(
    data: Any,
    plan: EpochPlan,
    settings: TrainSettings,
    augment: Augmentation | None,
    device: torch.device,
    stack_log: Path | None,
) -> FeedSource | None:
    """The source through the feed; None for samples that are not tensors of one shape."""
    order = RankBatches(plan)
    try:
        found = inspect(data, policy=settings.on_bad_sample, workers=settings.workers)
    except ShapesDiffer:
        if order.batch_size > 1:
            raise
        return None  # with one sample per batch, shapes may differ
    if found.layout is None:
        if settings.residency != "auto":
            raise UsageError(
                f"the data set cannot be kept in {settings.residency}: {found.unstorable_because}",
                "Use residency: auto or none, or return tensors of one shape.",
            )
        return None
    cache = SampleCache(
        data,
        found,
        order.batch_size,
        asked=settings.residency,
        device=device,
        seed=order.seed,
        workers=part_of(settings.workers, RankInfo(plan.rank, plan.world_size)),
        bad=BadSamples(len(data), settings.on_bad_sample, settings.max_bad_share),
        on_worker_start=partial(start_worker, stack_log),
    )
    return FeedSource(FeedLoader(order, cache, augment), plan)
