"""Where the batches of a step come from: a data set that the engine shuffles and resumes exactly, or ready batches."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from fulltilt.feed.augment import Augmentation
from fulltilt.feed.bad_samples import BadSamples, Policy
from fulltilt.feed.draws import mix
from fulltilt.feed.tiers import Residency
from fulltilt.train import batches, workers
from fulltilt.train.distributed import Ranks, part_of
from fulltilt.train.rng import sample_seed
from fulltilt.train.rows import counts_of_all
from fulltilt.train.sampler import EpochPlan, RankBatches
from fulltilt.train.skipping import CollateRest, failed, without_failures
from fulltilt.train.watchdog import listen_in_worker


@dataclass(frozen=True, slots=True)
class StepData:
    """The batches of one step on this rank. ``samples`` counts all ranks; ``consumed`` is the position after it."""

    batches: list[Any]
    samples: int
    consumed: int
    names: Callable[[], str]


class Source(Protocol):
    """Gives the steps of an epoch from a position on."""

    def steps(self, epoch: int, consumed: int) -> Iterator[StepData]:
        """The steps left in ``epoch`` after ``consumed`` (samples or batches) were used."""

    def steps_per_epoch(self) -> int | None:
        """Steps of a whole epoch, or None if nobody knows."""

    def steps_done(self, consumed: int) -> int:
        """How many steps of an epoch ``consumed`` makes."""

    def resized(self, batch_size: int, accumulation: int) -> Source:
        """The same data in other batches."""

    def close(self) -> None:
        """End the workers."""


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """How samples are fetched, and where they are kept. ``workers`` is the total over the ranks."""

    workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    stack_log: Path | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    residency: Residency = "none"
    on_bad_sample: Policy = "stop"
    max_bad_share: float = 0.01


class SeededSamples(torch.utils.data.Dataset[Any]):
    """A data set whose random draws depend on (seed, epoch, index) only: not on workers, ranks or resumes."""

    def __init__(self, samples: Any, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        with sample_seed(self.seed, epoch, index):
            try:
                return self.samples[index]
            except MemoryError:
                raise  # not the sample's fault
            except Exception as error:
                return failed(self.samples, index, error)


class MapSource:
    """A map-style data set behind a DataLoader whose workers live as long as the run."""

    def __init__(
        self,
        samples: Any,
        plan: EpochPlan,
        loading: LoaderSettings,
        collate: Callable[[list[Any]], Any] | None = None,
        augment: Augmentation | None = None,
    ) -> None:
        self.samples, self.plan, self.loading, self.collate, self.augment = samples, plan, loading, collate, augment
        self._batches = RankBatches(plan)
        self._bad = BadSamples(len(samples), loading.on_bad_sample, loading.max_bad_share)
        count = part_of(loading.workers, Ranks(plan.rank, plan.world))
        self._generator = torch.Generator()
        self._loader = torch.utils.data.DataLoader(
            SeededSamples(samples, plan.seed),
            batch_sampler=self._batches,
            collate_fn=CollateRest(collate or torch.utils.data.default_collate),
            num_workers=count,
            prefetch_factor=loading.prefetch if count else None,
            persistent_workers=count > 0,
            pin_memory=loading.pin_memory,
            worker_init_fn=WorkerStart(loading.stack_log) if count else None,
            generator=self._generator,  # the loader's own draws must not move the run's random state
        )

    def steps(self, epoch: int, consumed: int) -> Iterator[StepData]:
        """See Source. ``consumed`` counts samples over all ranks."""
        plan = replace(self.plan, epoch=epoch, start=consumed)
        self._batches.begin(plan)
        self._generator.manual_seed(mix(plan.seed, epoch))
        order = self._batches
        before = workers.look()
        drawn = iter(self._loader) if len(order) else iter(())
        for step in range(plan.steps):
            first, end = plan.span(step)
            try:
                taken = [next(drawn) for _ in plan.shares(step)]
            except (RuntimeError, OSError, EOFError) as error:
                codes = workers.exit_codes(getattr(drawn, "_workers", ()))
                explained = workers.explain(error, before, workers.look(), codes)
                if explained is None:
                    raise
                raise explained from error
            shares = [order.order[low:high] for low, high in plan.shares(step)]
            taken, shares = without_failures(taken, shares, self._bad)
            if self.augment is not None:
                taken = [self._augmented(*pair, epoch) for pair in zip(taken, shares, strict=True)]
            yield StepData(taken, end - first, end, partial(listed, order.order[first:end]))

    def steps_per_epoch(self) -> int:
        """See Source."""
        return self.plan.steps

    def steps_done(self, consumed: int) -> int:
        """See Source."""
        return consumed // self.plan.step_samples

    def resized(self, batch_size: int, accumulation: int) -> MapSource:
        """See Source."""
        if (batch_size, accumulation) == (self.plan.batch_size, self.plan.accumulation):
            return self
        self.close()
        plan = replace(self.plan, batch_size=batch_size, accumulation=accumulation)
        return MapSource(self.samples, plan, self.loading, self.collate, self.augment)

    def _augmented(self, batch: Any, indices: torch.Tensor, epoch: int) -> Any:
        assert self.augment is not None
        device = self.loading.device
        return self.augment(batches.to_device(batch, device), self.plan.seed, epoch, indices.to(device))

    def close(self) -> None:
        """See Source. Left to themselves the workers would notice up to five seconds later that we are gone."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            for worker in getattr(iterator, "_workers", ()):
                worker.kill()  # one that is stuck in a sample does not heed SIGTERM; see WorkerStart


class BatchSource:
    """Ready batches from any iterable. A resume goes to its position, or draws and drops what was used already."""

    def __init__(self, iterable: Any, accumulation: int, world: int) -> None:
        self.iterable, self.accumulation, self.world = iterable, accumulation, world

    def steps(self, epoch: int, consumed: int) -> Iterator[StepData]:
        """See Source. ``consumed`` counts batches of this rank."""
        positioned = hasattr(self.iterable, "begin_at")  # the feed's loaders find any batch without drawing to it
        if positioned:
            self.iterable.begin_at(epoch, consumed)
        elif hasattr(self.iterable, "set_epoch"):
            self.iterable.set_epoch(epoch)
        drawn = iter(self.iterable)
        for _ in range(0 if positioned else consumed):
            next(drawn, None)
        while True:
            taken = list(itertools.islice(drawn, self.accumulation))
            samples = sum(batches.size(batch) for batch in taken)
            if self.world > 1:  # a rank whose batches are used up takes part until those of all ranks are
                samples = sum(counts_of_all(samples))
            if not samples:
                return
            # Counted from one, as the progress bar counts.
            numbers = f"es {consumed + 1} to {consumed + len(taken)}" if len(taken) > 1 else f" {consumed + 1}"
            span = f"batch{numbers} of epoch {epoch + 1}"
            consumed += len(taken)
            yield StepData(taken, samples, consumed, lambda span=span: span)  # type: ignore[misc]

    def steps_per_epoch(self) -> int | None:
        """See Source."""
        try:
            return -(-len(self.iterable) // self.accumulation)
        except TypeError:
            return None

    def steps_done(self, consumed: int) -> int:
        """See Source."""
        return consumed // self.accumulation

    def resized(self, batch_size: int, accumulation: int) -> BatchSource:  # noqa: ARG002 - the batches are ready-made
        """See Source. Only the accumulation can change."""
        return BatchSource(self.iterable, accumulation, self.world)

    def close(self) -> None:
        """See Source. The iterable's workers are its owner's."""


class WorkerStart:
    """What a worker does first: leave signals to the parent, which saves; and show its stack when asked.

    Slurm and torchrun send SIGTERM to all processes of a job. The parent needs its workers for one step more.
    """

    def __init__(self, stack_log: Path | None) -> None:
        self.stack_log = stack_log

    def __call__(self, _worker: int = 0) -> None:
        """Called in the worker."""
        for name in ("SIGINT", "SIGUSR1"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        # A handler that does nothing, not SIG_IGN: programs that a data set starts must not inherit it.
        signal.signal(signal.SIGTERM, lambda *_: None)
        if self.stack_log is not None:
            listen_in_worker(self.stack_log)


def listed(ids: torch.Tensor, most: int = 16) -> str:
    """Samples in words, by their numbers."""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f"samples {', '.join(map(str, ids[:most].tolist()))}{more}"
