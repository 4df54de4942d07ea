"""``feed.loader``: iterates like a DataLoader, and yields batches that are already on the device.

declared stages          ``decode`` runs once, in the first epoch; its samples are then served from their tier;
                         ``augment`` runs on the device on every draw, seeded by (seed, epoch, index)
plain data set           kept if a check finds it deterministic (``dataset_check.py``)
random data set          read by workers on every draw, each sample seeded by (seed, epoch, index); nothing is kept
not fixed-shape tensors  refused: torch's DataLoader serves them
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import DataError, UsageError
from fulltilt.feed.augment import Augmentation, as_augmentation
from fulltilt.feed.dataset_check import inspect, length_of
from fulltilt.feed.dataset_objects import refuse_shared_handle
from fulltilt.feed.device_prefetch import DeviceBatches
from fulltilt.feed.epoch_order import (
    BatchOrder,
    Order,
    PositionedLoader,
    draws_of,
    is_whole,
    ranks,
    require,
    resumed_at,
    step_samples,
)
from fulltilt.feed.progress import progress
from fulltilt.feed.sample_cache import SampleCache
from fulltilt.feed.sample_reader import BadSamples, Decoded, Policy
from fulltilt.feed.sample_store import device_or_default
from fulltilt.feed.tiers import Residency, Tier
from fulltilt.feed.worker_pool import asked_workers

# Arguments of a DataLoader that are accepted and have no effect.
DECIDED_HERE = frozenset(
    {
        *("pin_memory", "pin_memory_device", "persistent_workers", "prefetch_factor"),
        *("timeout", "multiprocessing_context", "in_order"),
    }
)


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
    drop_last: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    num_workers: int | None = None,
    reserve_bytes: int | None = None,
    cache_dir: str | Path | None = None,
    on_bad_sample: Policy = "stop",
    max_bad_share: float = 0.01,
    checks: int = 8,
    **of_a_dataloader: Any,
) -> FeedLoader:
    """A loader over ``dataset`` whose batches are on ``device`` (default: the current GPU, else the CPU).

    ``decode`` is the deterministic stage: ``decode(dataset[i])`` is kept. ``augment`` runs on the device,
    seeded by (seed, epoch, sample), and is never kept. ``cache_key`` names the data and the version of ``decode`` for a
    disk cache that the next run finds. Without ``decode`` the data set is kept if a check finds it deterministic.
    ``residency`` is the tier that keeps the samples; ``reserve_bytes`` the VRAM to leave for the model (default:
    measured after three steps). A DataLoader's other arguments for workers and pinning have no effect.
    Raises UsageError, DataError, DoesNotFit.
    """
    if unknown := sorted(of_a_dataloader.keys() - DECIDED_HERE):
        raise UsageError(
            f"feed.loader has no {', '.join(unknown)}",
            "Random numbers follow from seed=..., batches from sampler=...; keep the DataLoader for a collate_fn.",
        )
    is_share = isinstance(max_bad_share, int | float) and 0 <= max_bad_share <= 1
    require("on_bad_sample", on_bad_sample, on_bad_sample in ("stop", "skip"), "'stop' or 'skip'")
    require("max_bad_share", max_bad_share, is_share, "from 0 to 1")
    require("checks", checks, is_whole(checks), "a whole number")
    require("cache_dir", cache_dir, isinstance(cache_dir, str | PathLike | None), "a folder")
    require("decode", decode, decode is None or callable(decode), "a function of what the data set returns")
    require("cache_key", cache_key, cache_key != "", "a text that names the data, as 'train-v3'")
    workers = asked_workers(num_workers)
    if num_workers and multiprocessing.current_process().daemon:
        raise UsageError(
            f"num_workers is {num_workers}, and this process is a daemon, which may start none", "Use num_workers=0."
        )
    length_of(dataset)
    if decode is not None:
        dataset = Decoded(dataset, decode)
    refuse_shared_handle(dataset, workers)
    try:
        found = inspect(dataset, checks=checks, policy=on_bad_sample, workers=workers)
    except DataError as error:
        error.__traceback__ = None
        raise
    if found.layout is None:
        raise UsageError(
            f"the samples are not tensors of one shape: {found.unstorable_because}",
            "Return tensors, arrays and numbers alone, or keep the DataLoader.",
        )
    order = Order(len(dataset), batch_size, shuffle, seed, drop_last, *ranks(rank, world_size), sampler)
    cache = SampleCache(
        dataset,
        found,
        order.batch_size,
        asked=residency,
        device=device_or_default(device),
        seed=seed,
        workers=workers,
        bad=BadSamples(len(dataset), on_bad_sample, max_bad_share),
        reserve_bytes=reserve_bytes,
        cache_dir=cache_dir,
        cache_key=cache_key,
    )
    return FeedLoader(order, cache, as_augmentation(augment))


class FeedLoader(PositionedLoader):
    """What ``feed.loader`` returns. ``notes`` says what it decided; ``tier`` is where the samples are kept."""

    def __init__(self, order: BatchOrder, cache: SampleCache, augment: Augmentation | None) -> None:
        super().__init__()
        self.order, self._cache, self._augment = order, cache, augment
        self.dataset, self.device = cache.dataset, cache.device
        self.workers, self.notes = cache.workers, cache.notes
        self._device_batches = DeviceBatches(cache)

    # ----------------------------------------------------------------- like a DataLoader

    @property
    def tier(self) -> Tier:
        """Where the decoded samples are kept; ``none`` until that is decided."""
        return self._cache.tier

    @property
    def sampler(self) -> Any:
        """The sampler that was given, or None. Its ``set_epoch`` is respected."""
        return getattr(self.order, "sampler", None)

    @property
    def batch_size(self) -> int:
        """Samples in a full batch on this rank."""
        return self.order.batch_size

    def __len__(self) -> int:
        return self.order.batches_per_epoch()

    def regroup(self, order: BatchOrder) -> None:
        """Use another order of the same samples from the next iteration on. What is kept stays."""
        if order.batch_size != self.order.batch_size:
            self._cache.resize(order.batch_size)
        self.order = order

    def state_dict(self) -> dict[str, int | None]:
        """The position: after loading it, the next batch is the one that would come now."""
        epoch, batch = self._at
        return {"epoch": epoch, "batch": batch, "seed": self.order.seed, "step_samples": step_samples(self.order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, also with other ranks or batch sizes. Raises UsageError where that is not possible."""
        self.begin_at(*resumed_at(state, self.order))

    def fill(self) -> None:
        """Decode everything now, with a progress bar, instead of in the first epoch."""
        cache = self._cache
        if cache.undecided:
            cache.settle(model_has_run=False)
        everything = [*torch.split(torch.arange(cache.samples), self.batch_size)]
        if cache.store is not None and len(cache.lacking(everything)):
            batches = self._device_batches.batches(everything, 0)
            for _ in progress(batches, len(everything), f"Decoding into {self.tier}"):
                pass
        cache.end_epoch()
        cache.leave_epoch()

    def close(self) -> None:
        """End the workers and free all memory. A complete disk cache stays for the next run."""
        self._cache.close()

    # ----------------------------------------------------------------- one epoch

    def _pass(self) -> Iterator[Any]:
        if (now := len(self.dataset)) != (before := self._cache.samples):
            raise UsageError(f"the data set had {before} samples and has {now} now", "Make another loader for it.")
        epoch, start = self._begin(self.sampler)
        cache = self._cache
        try:
            cache.begin_epoch(epoch)
            batches = self._device_batches.batches(draws_of(self.order, epoch)[start:], epoch)
            for number, (leaves, indices) in enumerate(batches, start):
                cache.batches_trained(number - start)
                batch = cache.layout.build_batch(leaves)
                self._at = epoch, number + 1  # a checkpoint after its step resumes after it
                if len(indices):
                    yield batch if self._augment is None else self._augment(batch, self.order.seed, epoch, indices)
                elif not isinstance(self.order, Order):
                    yield None  # the trainer counts its batches
                elif self.order.world_size > 1:
                    raise DataError(
                        f"every sample of batch {number} of epoch {epoch} is bad, and the other ranks count on it",
                        "Repair the samples that were skipped (loader.notes names them), or use larger batches.",
                    )
            cache.end_epoch()
        except DataError as error:
            error.__traceback__ = None  # frames of ours do not help the user
            raise
        finally:
            cache.leave_epoch()
        self._at = epoch + 1, 0
