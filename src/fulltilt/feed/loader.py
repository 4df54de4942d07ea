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

from fulltilt.batch_observer import observed
from fulltilt.errors import DataError, UsageError
from fulltilt.feed.augment import Augmentation, as_augmentation
from fulltilt.feed.cache_policy import CachePolicy, Notes, Residence
from fulltilt.feed.dataloader_fallback import FallbackLoader
from fulltilt.feed.dataset_check import Inspection, inspect, length_of
from fulltilt.feed.device_prefetch import DeviceBatches
from fulltilt.feed.epoch_order import (
    AGAIN,
    BatchOrder,
    GivenBatches,
    Order,
    Position,
    begins_again,
    draws_of,
    every_batch_counts,
    is_shuffled,
    ranks,
    replayable,
    resumed_at,
    sampler_of,
    step_samples,
    told_epoch,
)
from fulltilt.feed.handles import workers_without_sharing
from fulltilt.feed.progress import progress
from fulltilt.feed.sample_reader import BadSamples, Decoded, Policy, ShapesDiffer, pass_over
from fulltilt.feed.storage import device_or_default, home_of
from fulltilt.feed.tiers import Residency, Tier, default_workers
from fulltilt.records import Settings


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
    refuse_unknown(set(of_a_dataloader))
    if settings is None:
        settings = Settings()
    elif not isinstance(settings, Settings):
        raise UsageError(f"settings is a {type(settings).__name__}", "Give fulltilt.records.Settings(num_workers=...).")
    if settings.residency is not None and residency == "auto":
        residency = settings.residency  # type: ignore[assignment]
    workers = num_workers if num_workers is not None else settings.num_workers
    refuse_mistakes(
        seed=seed,
        num_workers=workers,
        collate_fn=collate_fn,
        reserve_bytes=reserve_bytes,
        cache_dir=cache_dir,
        cache_limit_bytes=cache_limit_bytes,
        on_bad_sample=on_bad_sample,
        max_bad_share=max_bad_share,
        checks=checks,
        decode=decode,
        cache_key=cache_key,
    )
    workers = default_workers() if workers is None else workers
    size = settings.batch_size if settings.batch_size is not None and batch_size == 1 else batch_size
    length_of(dataset)
    if decode is not None:
        dataset = Decoded(dataset, decode)
    workers, shared = workers_without_sharing(dataset, workers)
    found = _inspected(dataset, size, checks, on_bad_sample, workers) if collate_fn is None else Inspection(None)
    order: BatchOrder
    if batch_sampler is not None:
        if shuffle or drop_last or sampler is not None or size != 1:
            raise UsageError(
                "a batch_sampler decides on the batches itself", "Leave out batch_size, shuffle, sampler and drop_last."
            )
        order = GivenBatches(len(dataset), replayable(batch_sampler), seed)
    else:
        rank, world_size = ranks(rank, world_size)
        order = Order(
            samples=len(dataset),
            batch_size=size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            sampler=replayable(sampler),
        )
    device = device_or_default(device)
    home = home_of(dataset, device)
    made = FeedLoader(
        dataset,
        order,
        found,
        augment=as_augmentation(augment),
        residence=Residence(
            dataset, found, residency, home, reserve_bytes, cache_dir, cache_limit_bytes, checks, cache_key
        ),
        device=device,
        workers=workers,
        collate_fn=collate_fn,
        bad=BadSamples(len(dataset), on_bad_sample, max_bad_share),
    )
    if shared is not None:
        made.notes.warn(shared)
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


class FeedLoader:
    """What ``feed.loader`` returns. ``notes`` collects in words what it decided; ``tier`` is where the samples live."""

    def __init__(
        self,
        dataset: Any,
        order: BatchOrder,
        found: Inspection,
        *,
        augment: Augmentation | None,
        residence: Residence,
        device: torch.device,
        workers: int,
        collate_fn: Callable[..., Any] | None,
        bad: BadSamples,
        on_worker_start: Callable[[], None] | None = None,
    ) -> None:
        self.dataset, self.order, self.device = dataset, order, device
        self.notes = Notes()
        self.workers = workers
        self._augment = augment
        self._residence = residence
        self._finishes = bool(getattr(dataset, "finishes_on_device", False))
        self._position = Position()
        self._fallback: FallbackLoader | None = None
        self._policy: CachePolicy | None = None
        self._bad = bad
        self._collate, self._on_worker_start, self._found = collate_fn, on_worker_start, found
        if found.layout is None:
            self._fall_back(found.unstorable_because or "a collate_fn was given", collate_fn)
        else:
            self._device_batches = DeviceBatches(found.layout, residence.device)
            self._policy = CachePolicy(
                residence,
                found.layout,
                order.batch_size,
                seed=order.seed,
                workers=workers,
                bad=bad,
                notes=self.notes,
                on_worker_start=on_worker_start,
            )

    # ----------------------------------------------------------------- like a DataLoader

    @property
    def tier(self) -> Tier:
        """Where the decoded samples live; ``none`` until that is decided."""
        return self._residence.tier

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

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration draws. Without it each iteration draws the epoch after the last one."""
        self.begin_at(epoch, 0)

    def begin_at(self, epoch: int, batch: int) -> None:
        """Let the next iteration begin with batch number ``batch`` of ``epoch``. Raises UsageError."""
        self._position.begin_at(epoch, batch)

    def regroup(self, order: BatchOrder) -> None:
        """Draw the same samples in the batches of another order from the next iteration on. What is kept stays."""
        if order.batch_size != self.order.batch_size and self._policy is not None:
            self._policy.rows.resize(order.batch_size)
            self._device_batches.close()
        self.order = order

    def state_dict(self) -> dict[str, int | None]:
        """Where the iteration stands: after a load, the next batch is the one that would have come now."""
        standing = {"epoch": self._position.epoch, "batch": self._position.batch}
        return {**standing, "seed": self.order.seed, "step_samples": step_samples(self.order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, with other ranks or batches too. Raises UsageError where that is not possible."""
        self.begin_at(*resumed_at(state, self.order))

    def __iter__(self) -> Iterator[Any]:
        return observed(self, self._pass())

    def fill(self, *, shown: bool | None = None) -> None:
        """Decode everything now, with a progress bar, instead of while the first epoch trains."""
        policy = self._policy
        if policy is None or not self._residence.wanted:
            return
        policy.settle(model_has_run=False)
        everything = [*torch.split(torch.arange(self._residence.samples), self.batch_size)]
        if policy.rows.store is not None and policy.rows.missing(everything):
            batches = self._device_batches.batches(policy.rows, everything, 0)
            for _ in progress(batches, len(everything), f"Decoding into {self.tier}", shown=shown):
                pass
        policy.end_epoch()
        policy.leave_epoch()

    def close(self) -> None:
        """End the workers and give all memory back. A complete disk cache stays for the next run."""
        if self._policy is not None:
            self._policy.rows.close()
            self._device_batches.close()

    def __enter__(self) -> FeedLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or a loader sent to another process, begins where this one stands and keeps samples of its own."""
        made_with = {
            "augment": self._augment,
            "residence": self._residence,
            "device": self.device,
            "workers": self.workers,
            "collate_fn": self._collate,
            "bad": self._bad,
            "on_worker_start": self._on_worker_start,
        }
        return _made_anew, (self.dataset, self.order, self._found, made_with, *self._position.next)

    # ----------------------------------------------------------------- one epoch

    def _pass(self) -> Iterator[Any]:
        if (now := len(self.dataset)) != self._residence.samples:
            raise UsageError(
                f"the data set had {self._residence.samples} samples and has {now} now", "Make another loader for it."
            )
        self._tell_if_made_in_each_epoch()
        epoch, start = self._position.begin(self.order)
        try:
            for number, (batch, indices) in enumerate(self._batches(epoch, start), start):
                self._position.handed_out(epoch, number)
                if len(indices):
                    yield self._finished(batch, indices, epoch)
                else:
                    pass_over(number, epoch, awaited=every_batch_counts(self.order))
        except DataError as error:
            error.__traceback__ = None  # where in here it was noticed tells its owner nothing
            raise
        self._position.ended(epoch)

    def _tell_if_made_in_each_epoch(self) -> None:
        random = is_shuffled(self.order) or self._augment is not None or self._found.random_because is not None
        by_itself = self._position.counts_by_itself and told_epoch(self.order) is None
        if random and by_itself and begins_again(self.order, type(self.dataset), self._residence.samples):
            self.notes.warn(AGAIN)

    def _finished(self, batch: Any, indices: torch.Tensor, epoch: int) -> Any:
        if self._finishes:
            batch, indices = self.dataset.finish_on_device(batch, self.device), indices.to(self.device)
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
        self._residence.refuse_if_asked(why)
        self.close()
        self.notes.say(f"served by a DataLoader with {self.workers} workers: {why}")
        self._fallback = FallbackLoader(
            self.dataset, self.order, collate_fn, self.workers, self.device, self._bad, self.notes.skipped
        )

    def _kept(self, epoch: int, start: int) -> Iterator[tuple[Any, torch.Tensor]]:
        policy = self._policy
        assert policy is not None
        policy.begin_epoch(epoch)
        drawn = draws_of(self.order, epoch)[start:]
        largest = max((len(batch) for batch in drawn), default=0)
        if largest > policy.rows.batch_size:  # a batch sampler may not say beforehand how large they get
            policy.rows.resize(largest)
        batches = self._device_batches.batches(policy.rows, drawn, epoch)
        try:
            for number, (leaves, indices) in enumerate(batches):
                policy.batches_trained(number)
                yield policy.layout.build_batch(leaves), indices
            policy.end_epoch()
        finally:
            policy.leave_epoch()


def _made_anew(
    dataset: Any, order: BatchOrder, found: Inspection, made_with: dict[str, Any], epoch: int, batch: int
) -> FeedLoader:
    made = FeedLoader(dataset, order, found, **made_with)
    made.begin_at(epoch, batch)
    return made


# What a DataLoader can be told and the feed decides by itself, so that one can stand in for the other in a script.
DECIDED_HERE = frozenset(
    {
        *("pin_memory", "pin_memory_device", "persistent_workers", "prefetch_factor"),
        *("timeout", "multiprocessing_context", "in_order"),
    }
)


def refuse_unknown(names: set[str]) -> None:
    """Raise UsageError for arguments that a DataLoader knows and the feed has no use for."""
    if unknown := sorted(names - DECIDED_HERE):
        raise UsageError(
            f"feed.loader has no {', '.join(unknown)}", "Random numbers follow from seed=..., batches from sampler=..."
        )


def refuse_mistakes(
    *,
    seed: Any,
    num_workers: Any,
    collate_fn: Any,
    reserve_bytes: Any,
    cache_dir: Any,
    cache_limit_bytes: Any,
    on_bad_sample: Any,
    max_bad_share: Any,
    checks: Any,
    decode: Any,
    cache_key: Any,
) -> None:
    """Raise UsageError for the first argument that is not what it has to be."""
    if on_bad_sample not in ("stop", "skip"):
        raise UsageError(f"on_bad_sample is {on_bad_sample!r}", "Choose 'stop' or 'skip'.")
    if not isinstance(max_bad_share, int | float) or not 0.0 <= max_bad_share <= 1.0:
        raise UsageError(f"max_bad_share is {max_bad_share!r}; it is a share of the samples, from 0 to 1")
    if num_workers is not None and (type(num_workers) is not int or num_workers < 0):
        raise UsageError(f"num_workers is {num_workers!r}; it must be a whole number of at least 0")
    if num_workers and multiprocessing.current_process().daemon:
        raise UsageError(
            f"num_workers is {num_workers}, and this process is a daemon, which may start none", "Use num_workers=0."
        )
    if not isinstance(checks, int) or checks < 0:
        raise UsageError(f"checks is {checks!r}; it must be a number of samples")
    if not isinstance(seed, int):
        raise UsageError(f"seed is {seed!r}; it must be a whole number")
    for name, count in (("reserve_bytes", reserve_bytes), ("cache_limit_bytes", cache_limit_bytes)):
        if count is not None and (not isinstance(count, int | float) or count < 0):
            raise UsageError(f"{name} is {count!r}; it must be a number of bytes")
    if collate_fn is not None and not callable(collate_fn):
        raise UsageError(f"collate_fn is {collate_fn!r}; it must be a function of a list of samples")
    if decode is not None and not callable(decode):
        raise UsageError(f"decode is {decode!r}; it must be a function of what the data set returns")
    if cache_key is not None and (not isinstance(cache_key, str) or not cache_key):
        raise UsageError(f"cache_key is {cache_key!r}; it must be a text that names the data, such as 'train-v3'")
    if cache_dir is not None and not isinstance(cache_dir, str | os.PathLike):
        raise UsageError(f"cache_dir is {cache_dir!r}; it must be a folder")
