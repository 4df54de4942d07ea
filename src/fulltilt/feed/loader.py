"""``feed.loader``: iterates like a DataLoader, and yields batches that are already on the device.

declared stages          ``decode`` runs once while the first epoch trains, its samples are then served from their tier;
                         ``augment`` runs on the device on every draw, seeded by (seed, epoch, index)
plain data set           kept if a check finds it deterministic (``dataset_check.py``)
random data set          read by workers on every draw, each sample seeded by (seed, epoch, index); nothing is kept
not fixed-shape tensors  torch's DataLoader with tuned settings
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from fulltilt.errors import DataError, UsageError
from fulltilt.feed.augment import Augmentation, as_augmentation
from fulltilt.feed.dataset_check import Inspection, inspect, length_of
from fulltilt.feed.dataset_objects import attributes, changed_attribute, shared_handle
from fulltilt.feed.device_prefetch import DeviceBatches
from fulltilt.feed.epoch_order import (
    BatchOrder,
    GivenBatches,
    Order,
    PositionedLoader,
    draws_of,
    every_batch_counts,
    ranks,
    resumed_at,
    sample_of,
    sampler_of,
    step_samples,
)
from fulltilt.feed.progress import progress
from fulltilt.feed.sample_cache import Notes, SampleCache, refuse_if_asked
from fulltilt.feed.sample_layout import mapping_like, own_move, sequence_of
from fulltilt.feed.sample_reader import BadSamples, Decoded, Failure, Policy, ShapesDiffer, failure_of
from fulltilt.feed.sample_store import device_or_default
from fulltilt.feed.tiers import Residency, Tier, default_workers
from fulltilt.records import Settings

# What a DataLoader can be told and the feed decides by itself, so that one can stand in for the other in a script.
DECIDED_HERE = frozenset(
    {
        *("pin_memory", "pin_memory_device", "persistent_workers", "prefetch_factor"),
        *("timeout", "multiprocessing_context", "in_order"),
    }
)


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and value >= 0


def _or_none(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or right(value)


# What the arguments of ``loader`` have to be, and in words.
_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "on_bad_sample": (lambda value: value in ("stop", "skip"), "'stop' or 'skip'"),
    "max_bad_share": (lambda value: _number(value) and value <= 1, "from 0 to 1"),
    "num_workers": (_or_none(_count), "a whole number of at least 0"),
    "checks": (_count, "a number of samples"),
    "seed": (lambda value: isinstance(value, int), "a whole number"),
    "reserve_bytes": (_or_none(_number), "a number of bytes"),
    "cache_limit_bytes": (_or_none(_number), "a number of bytes"),
    "collate_fn": (_or_none(callable), "a function of a list of samples"),
    "decode": (_or_none(callable), "a function of what the data set returns"),
    "cache_key": (
        _or_none(lambda value: isinstance(value, str) and value != ""),
        "a text that names the data, as 'train-v3'",
    ),
    "cache_dir": (_or_none(lambda value: isinstance(value, str | os.PathLike)), "a folder"),
}


def loader(
    dataset: Any,
    batch_size: int = 1,
    *,
    decode: Callable[[Any], Any] | None = None,
    augment: Augmentation | Iterable[Any] | Callable[[Any], Any] | None = None,
    cache_key: str | None = None,
    residency: Residency = "auto",
    shuffle: bool = False,
    sampler: Iterable[int] | None = None,
    batch_sampler: Iterable[Iterable[int]] | None = None,
    drop_last: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    num_workers: int | None = None,
    collate_fn: Callable[..., Any] | None = None,
    reserve_bytes: int | None = None,
    cache_dir: str | Path | None = None,
    cache_limit_bytes: int | None = None,
    on_bad_sample: Policy = "stop",
    max_bad_share: float = 0.01,
    checks: int = 8,
    settings: Settings | None = None,
    **of_a_dataloader: Any,
) -> FeedLoader:
    """A loader over ``dataset`` whose batches are on ``device`` (default: the current GPU, else the CPU).

    ``decode`` is the stage that is the same every time: ``decode(dataset[i])`` is kept. ``augment`` runs on the device,
    seeded by (seed, epoch, sample), and is never kept. ``cache_key`` names the data and the version of ``decode`` for a
    disk cache that the next run finds. A data set of which nothing is declared is kept if a check finds it
    deterministic. ``residency`` is the tier the decoded samples live on; ``reserve_bytes`` the VRAM to leave for the
    model (default: known after three steps). ``settings`` gives batch size, workers and residency where they are not
    given here. What else a DataLoader takes about workers and pinning may stay in the call.
    Raises UsageError, DataError, DoesNotFit.
    """
    given = dict(locals())
    if unknown := sorted(of_a_dataloader.keys() - DECIDED_HERE):
        raise UsageError(
            f"feed.loader has no {', '.join(unknown)}", "Random numbers follow from seed=..., batches from sampler=..."
        )
    settings = Settings() if settings is None else settings
    if not isinstance(settings, Settings):
        raise UsageError(f"settings is a {type(settings).__name__}", "Give fulltilt.records.Settings(num_workers=...).")
    if settings.residency is not None and residency == "auto":
        residency = settings.residency  # type: ignore[assignment]
    workers = num_workers if num_workers is not None else settings.num_workers
    size = settings.batch_size if settings.batch_size is not None and batch_size == 1 else batch_size
    for name, (right, expected) in _ARGUMENTS.items():
        value = workers if name == "num_workers" else given[name]
        if not right(value):
            raise UsageError(f"{name} is {value!r}; it must be {expected}")
    if workers and multiprocessing.current_process().daemon:
        raise UsageError(
            f"num_workers is {workers}, and this process is a daemon, which may start none", "Use num_workers=0."
        )
    length_of(dataset)
    if decode is not None:
        dataset = Decoded(dataset, decode)
    workers = default_workers() if workers is None else workers
    if held := shared_handle(dataset) if workers else None:
        shared_by, workers = workers, 0
    found = _inspected(dataset, size, checks, on_bad_sample, workers) if collate_fn is None else Inspection(None)
    order: BatchOrder
    if batch_sampler is not None:
        if shuffle or drop_last or sampler is not None or size != 1:
            raise UsageError(
                "a batch_sampler decides on the batches itself", "Leave out batch_size, shuffle, sampler and drop_last."
            )
        order = GivenBatches(len(dataset), batch_sampler, seed)
    else:
        order = Order(len(dataset), size, shuffle, seed, drop_last, *ranks(rank, world_size), sampler)
    made = FeedLoader(
        dataset,
        order,
        found,
        augment=as_augmentation(augment),
        residency=residency,
        device=device_or_default(device),
        workers=workers,
        collate_fn=collate_fn,
        bad=BadSamples(len(dataset), on_bad_sample, max_bad_share),
        reserve_bytes=reserve_bytes,
        cache_dir=cache_dir,
        cache_limit_bytes=cache_limit_bytes,
        cache_key=cache_key,
        checks=checks,
    )
    if held:
        made.notes.warn(
            f"read in this process alone: the data set holds an open {held}, which {shared_by} workers would share; "
            "open it in the first __getitem__ for workers"
        )
    return made


def _inspected(dataset: Any, batch_size: int, checks: int, policy: Policy, workers: int) -> Inspection:
    try:
        return inspect(dataset, checks=checks, policy=policy, workers=workers)
    except ShapesDiffer as differ:
        if batch_size != 1:
            raise
        return Inspection(None, unstorable_because=str(differ))  # one sample a batch: nothing has to fit together
    except DataError as error:
        error.__traceback__ = None
        raise


class FeedLoader(PositionedLoader):
    """What ``feed.loader`` returns. ``notes`` collects in words what it decided; ``tier`` is where the samples live."""

    def __init__(
        self,
        dataset: Any,
        order: BatchOrder,
        found: Inspection,
        *,
        augment: Augmentation | None,
        residency: Residency,
        device: torch.device,
        workers: int,
        bad: BadSamples,
        collate_fn: Callable[..., Any] | None = None,
        on_worker_start: Callable[[], None] | None = None,
        **cache_options: Any,
    ) -> None:
        super().__init__()
        self.dataset, self.order, self.device, self.workers = dataset, order, device, workers
        self.notes = Notes()
        self._augment, self._bad, self._asked, self._found = augment, bad, residency, found
        self._samples = len(dataset)
        self._fallback: FallbackLoader | None = None
        self._cache: SampleCache | None = None
        if found.layout is None:
            self._fall_back(found.unstorable_because or "a collate_fn was given", collate_fn)
        else:
            self._device_batches = DeviceBatches(found.layout, device)
            self._cache = SampleCache(
                dataset,
                found,
                found.layout,
                order.batch_size,
                asked=residency,
                device=device,
                seed=order.seed,
                workers=workers,
                bad=bad,
                notes=self.notes,
                on_worker_start=on_worker_start,
                **cache_options,
            )

    # ----------------------------------------------------------------- like a DataLoader

    @property
    def tier(self) -> Tier:
        """Where the decoded samples live; ``none`` until that is decided."""
        return "none" if self._cache is None else self._cache.tier

    @property
    def sampler(self) -> Any:
        """The sampler or batch sampler that was given; None without one. Its ``set_epoch`` is heeded."""
        return sampler_of(self.order)

    @property
    def batch_size(self) -> int:
        """Samples in a full batch on this rank."""
        return self.order.batch_size

    def __len__(self) -> int:
        return self.order.batches_per_epoch()

    def regroup(self, order: BatchOrder) -> None:
        """Draw the same samples in the batches of another order from the next iteration on. What is kept stays."""
        if order.batch_size != self.order.batch_size and self._cache is not None:
            self._cache.rows.resize(order.batch_size)
            self._device_batches.close()
        self.order = order

    def state_dict(self) -> dict[str, int | None]:
        """Where the iteration stands: after a load, the next batch is the one that would have come now."""
        standing = {"epoch": self._position.epoch, "batch": self._position.batch}
        return {**standing, "seed": self.order.seed, "step_samples": step_samples(self.order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, with other ranks or batches too. Raises UsageError where that is not possible."""
        self.begin_at(*resumed_at(state, self.order))

    def fill(self, *, shown: bool | None = None) -> None:
        """Decode everything now, with a progress bar, instead of while the first epoch trains."""
        cache = self._cache
        if cache is None or not cache.wanted:
            return
        cache.settle(model_has_run=False)
        everything = [*torch.split(torch.arange(self._samples), self.batch_size)]
        if cache.rows.store is not None and len(cache.rows.lacking(everything)):
            batches = self._device_batches.batches(cache.rows, everything, 0)
            for _ in progress(batches, len(everything), f"Decoding into {self.tier}", shown=shown):
                pass
        cache.end_epoch()
        cache.leave_epoch()

    def close(self) -> None:
        """End the workers and give all memory back. A complete disk cache stays for the next run."""
        if self._cache is not None:
            self._cache.rows.close()
            self._device_batches.close()

    # ----------------------------------------------------------------- one epoch

    def _pass(self) -> Iterator[Any]:
        if (now := len(self.dataset)) != self._samples:
            raise UsageError(
                f"the data set had {self._samples} samples and has {now} now", "Make another loader for it."
            )
        epoch, start = self._position.begin(self.order)
        try:
            for number, (batch, indices) in enumerate(self._batches(epoch, start), start):
                self._position.handed_out(epoch, number)
                if len(indices):
                    yield self._finished(batch, indices, epoch)
                elif every_batch_counts(self.order):
                    raise DataError(
                        f"every sample of batch {number} of epoch {epoch} is bad, and the other ranks or the trainer "
                        "count on it",
                        "Repair the samples that were skipped (loader.notes names them), or use larger batches.",
                    )
        except DataError as error:
            error.__traceback__ = None  # where in here it was noticed tells its owner nothing
            raise
        self._position.ended(epoch)

    def _finished(self, batch: Any, indices: torch.Tensor, epoch: int) -> Any:
        return batch if self._augment is None else self._augment(batch, self.order.seed, epoch, indices)

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Any, torch.Tensor]]:
        if self._fallback is None:
            try:
                for served in self._kept(epoch, start):
                    start += 1
                    yield served
                return
            except ShapesDiffer as differ:
                # A batch of one, and a batch sampler that puts like with like, can do with samples of many shapes.
                if isinstance(self.order, Order) and self.order.batch_size > 1:
                    raise
                self._fall_back(differ.what)
        assert self._fallback is not None
        yield from self._fallback.batches(epoch, start)

    def _fall_back(self, why: str, collate_fn: Callable[..., Any] | None = None) -> None:
        """Serve by torch's DataLoader from now on."""
        refuse_if_asked(self._asked, why, self._found)
        self.close()
        self.notes.say(f"served by a DataLoader with {self.workers} workers: {why}")
        self._fallback = FallbackLoader(
            self.dataset, self.order, collate_fn, self.workers, self.device, self._bad, self.notes.skipped
        )

    def _kept(self, epoch: int, start: int) -> Iterator[tuple[Any, torch.Tensor]]:
        cache = self._cache
        assert cache is not None
        cache.begin_epoch(epoch)
        drawn = draws_of(self.order, epoch)[start:]
        largest = max((len(batch) for batch in drawn), default=0)
        if largest > cache.rows.batch_size:  # a batch sampler may not say beforehand how large they get
            cache.rows.resize(largest)
        batches = self._device_batches.batches(cache.rows, drawn, epoch)
        try:
            for number, (leaves, indices) in enumerate(batches):
                cache.batches_trained(number)
                yield cache.layout.build_batch(leaves), indices
            cache.end_epoch()
        finally:
            cache.leave_epoch()


# --------------------------------------------------------------------------- what cannot be kept


class FallbackLoader:
    """Batches of ``dataset`` through ``collate_fn``, moved to the device without waiting."""

    def __init__(
        self,
        dataset: Any,
        order: BatchOrder,
        collate_fn: Callable[..., Any] | None,
        workers: int,
        device: torch.device,
        bad: BadSamples,
        on_bad: Callable[[Failure], None],
    ) -> None:
        self._samples, self._collate = _Samples(dataset), _Collate(collate_fn or default_collate)
        self._order, self._workers, self._device = order, workers, device
        self._bad, self._on_bad = bad, on_bad
        self._loader: DataLoader[Any] | None = None  # None while a pass has it
        self._attributes = attributes(dataset)

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Any, torch.Tensor]]:
        """The batches of ``epoch`` from number ``start`` on, each with the numbers of its draws."""
        drawn = [self._bad.without_bad(batch) for batch in draws_of(self._order, epoch)[start:]]
        loader, self._loader = self._loader_for_now(), None
        # Drawn once: a random sampler would give others when asked again.
        loader.batch_sampler[:] = [sample_of(batch).tolist() for batch in drawn if len(batch)]  # type: ignore[index]
        try:
            made = iter(loader)
            for indices in drawn:
                batch, failures, refused = next(made) if len(indices) else (None, [], None)
                if refused is not None:
                    raise ShapesDiffer(
                        f"torch cannot make a batch of samples {sample_of(indices).tolist()}: {refused}",
                        "Put samples of one shape into a batch, or give a collate_fn that pads.",
                    )
                for failure in self._bad.note(failures):
                    self._on_bad(failure)
                left = self._bad.without_bad(indices)
                yield to_device(batch, self._device), left.to(self._device, non_blocking=True)
        finally:
            self._loader = loader

    def _loader_for_now(self) -> DataLoader[Any]:
        """One that no other pass is using, whose workers have the data set as it is now."""
        now = attributes(self._samples.dataset)
        if self._loader is not None and changed_attribute(self._attributes, now) is None:
            return self._loader
        self._attributes = now
        return DataLoader(
            self._samples,
            batch_sampler=list[list[int]](),  # one object for all epochs: its workers live through them
            num_workers=self._workers,
            collate_fn=self._collate,
            pin_memory=self._device.type == "cuda",
            persistent_workers=self._workers > 0,
        )


class _Samples(Dataset[Any]):
    """The data set, with a failure in the place of a sample that cannot be read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            return failure_of(self.dataset, index, error)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            try:
                return list(self.dataset.__getitems__(indices))
            except Exception:  # read one by one, the culprit can be named
                pass
        return [self[index] for index in indices]


class _Collate:
    """A batch of the samples that could be read, what happened to the others, and why it could not be made."""

    def __init__(self, collate: Callable[..., Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, list[Failure], str | None]:
        failures = [sample for sample in samples if isinstance(sample, Failure)]
        good = [sample for sample in samples if not isinstance(sample, Failure)]
        try:
            return self.collate(good) if good else None, failures, None
        except Exception as error:
            if self.collate is not default_collate:
                raise  # the user's own code: its traceback tells more
            return None, failures, " ".join(str(error).split())


def to_device(value: Any, device: torch.device) -> Any:
    """A batch of any structure on ``device``; tensors without waiting. A class that has ``to(device)`` moves itself."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return mapping_like(value)({key: to_device(item, device) for key, item in value.items()})
    if (move := own_move(value)) is not None:
        return move(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return sequence_of(type(value), [to_device(item, device) for item in value])
    return value
