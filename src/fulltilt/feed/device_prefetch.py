"""Batches on the device, from any tier: rows in host memory are copied ahead of their use."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from fulltilt import cuda_capture
from fulltilt.feed.epoch_order import sample_of
from fulltilt.feed.sample_cache import HostRows, SampleCache
from fulltilt.feed.sample_store import Store
from fulltilt.feed.worker_pool import WorkerPool

# Up to so many batches that are missing in the device store are read before an epoch.
READ_FIRST_BATCHES = 16

Leaves = tuple[list[torch.Tensor], torch.Tensor]  # the leaves of a batch, and the numbers of its draws on the device
# A batch in host memory; its rows, draws and samples on the device.
Copied = tuple[HostRows, torch.Tensor, torch.Tensor, torch.Tensor]
Item = TypeVar("Item", bound=tuple[Any, ...])


def copy_stream(device: torch.device) -> Any:
    """A stream for copies beside the training's; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def enter_thread(device: torch.device) -> None:
    """Set the device of a new thread, which would use the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        cuda_capture.use_thread_local_mode()


def ahead(items: Generator[Item, None, None], device: torch.device, stream: Any) -> Generator[Item, None, None]:
    """``items``, each made by a thread on ``stream`` while the last one is used. The thread ends with them."""

    def following() -> Item | None:
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            item = next(items, None)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # the item is complete for any stream
        return item

    with contextlib.closing(items), ThreadPoolExecutor(1, "fulltilt-feed", enter_thread, (device,)) as thread:
        upcoming = thread.submit(following)
        while (made := upcoming.result()) is not None:
            upcoming = thread.submit(following)
            for part in pytree.tree_leaves(made) if stream is not None else ():
                if isinstance(part, torch.Tensor) and part.is_cuda:
                    # Allocated on the other stream.
                    part.record_stream(torch.cuda.current_stream(device))
            yield made


class DeviceBatches:
    """Brings batches of draws to the device, in order. The tensors belong to the caller."""

    def __init__(self, cache: SampleCache) -> None:
        self._cache, self._device = cache, cache.device
        self._stream = copy_stream(cache.device)
        self.copies_ahead = cache.device.type == "cuda"  # on a CPU there is nothing to copy to

    def batches(self, batches: list[torch.Tensor], epoch: int) -> Iterator[Leaves]:
        """The leaves of each batch, from any tier."""
        cache = self._cache
        if cache.store is not None and cache.store.on_device:
            lacking = cache.lacking(batches)
            # Samples that earlier passes left out (drop_last, a tier chosen in mid-epoch) are read first: batches from
            # the device alone need no assembling thread, with which a busy host is a third slower.
            few = len(lacking) <= READ_FIRST_BATCHES * cache.batch_size and 2 * len(lacking) <= sum(map(len, batches))
            if len(lacking) and few:
                for _ in self._from_source(list(torch.split(lacking, cache.batch_size)), epoch):
                    pass
                lacking = cache.lacking(batches)
            if cache.store is not None and not len(lacking):
                return self._resident(cache.store, [cache.bad.without_bad(batch) for batch in batches])
        return self._from_source(batches, epoch)

    def _resident(self, store: Store, batches: list[torch.Tensor]) -> Iterator[Leaves]:
        """Batches of a complete device store: one upload of indices for the epoch, then one gather a batch."""
        if batches:
            draws, sizes = torch.cat(batches), [len(batch) for batch in batches]
            samples = sample_of(draws)
            indices = torch.split(samples.to(self._device), sizes)
            numbers = indices if torch.equal(samples, draws) else torch.split(draws.to(self._device), sizes)
            for picked, drawn in zip(indices, numbers, strict=True):
                yield self._leaves(store.gather(picked)), drawn

    def _from_source(self, batches: list[torch.Tensor], epoch: int) -> Iterator[Leaves]:
        # Workers are forked here, on the main thread, not in the feeding thread.
        pool = self._cache.take_pool() if len(self._cache.lacking(batches)) else None
        # Without workers the data set runs on the caller's thread, because both may draw from the same generators.
        by_thread = self.copies_ahead and (pool is None or pool.workers > 0)
        copied = self._copied(batches, epoch, pool, by_thread)
        if by_thread:
            copied = ahead(copied, self._device, self._stream)
        try:
            with contextlib.closing(copied):
                for batch, rows, draws, samples in copied:
                    store = batch.store
                    if store is not None and len(samples):
                        store.write(batch.samples, rows, samples)
                    yield self._leaves(rows if store is None else store.gather(sample_of(draws))), draws
        finally:
            if pool is not None:
                self._cache.give_back(pool)

    def _copied(
        self, batches: list[torch.Tensor], epoch: int, pool: WorkerPool | None, by_thread: bool
    ) -> Generator[Copied, None, None]:
        """Each batch on the device. Its host memory is reused when the next one is asked for."""
        device, shape = self._device, (self._cache.batch_size, self._cache.layout.row_bytes)
        with torch.inference_mode(False):  # a pass begun in an evaluation may go on outside of it
            buffer = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda" and by_thread)
        with contextlib.closing(self._cache.host_rows(batches, epoch, pool, buffer)) as assembled:
            for batch in assembled:
                words = batch.rows.view(torch.int64).to(device, non_blocking=by_thread, copy=True)
                yield batch, words.view(torch.uint8), batch.draws.to(device, copy=True), batch.samples.to(device)

    def _leaves(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of a batch from its ``rows``."""
        return [leaf.contiguous() for leaf in self._cache.layout.split(rows)]
