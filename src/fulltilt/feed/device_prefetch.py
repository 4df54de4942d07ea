"""Batches on the device, from wherever their samples are: rows in host memory are copied ahead of their use.

Copies run on a stream of their own, through a fixed ring of buffers: the allocator plays no part while training. Three
events keep its users apart:
 1. ``copied``: the compute stream waits for it before it reads a buffer;
 2. ``consumed``: the copy stream waits for it before it overwrites the buffer;
 3. the host waits for ``copied`` (in the feeding thread) before it fills the host buffer again.
On a CPU device the same thread and ring run without streams.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from fulltilt import cuda_capture
from fulltilt.feed.epoch_order import sample_of
from fulltilt.feed.sample_cache import HostRows, SampleCache
from fulltilt.feed.sample_layout import Layout
from fulltilt.feed.sample_store import Store, pin, shared_bytes

DEPTH = 3
# What an epoch left out of a device store is read before the next one begins, if it is no more than so many batches.
READ_FIRST_BATCHES = 16

Leaves = tuple[list[torch.Tensor], torch.Tensor]  # the leaves of a batch, and the numbers of its draws on the device
# The batches of a pass in buffers that a function gives: SampleCache.host_rows of them.
Assemble = Callable[[Callable[[], torch.Tensor]], Generator[HostRows, None, None]]


class _Left(Exception):  # noqa: N818 - ends the feeding thread
    pass


class DeviceRing:
    """A fixed number of host buffers, pinned, each with one on the device, that a feeding thread fills in turn."""

    @torch.inference_mode(False)  # made in an evaluation, it has to be of use to the feeding thread
    def __init__(self, rows: int, row_bytes: int, device: torch.device) -> None:
        self.device, self.rows = device, rows
        self._cuda = cuda = device.type == "cuda"
        # torch.cuda, or torch.cpu, whose streams and events do nothing.
        self._torch: Any = torch.get_device_module(device)
        self._stream = self._torch.Stream(device)
        memory = shared_bytes(DEPTH * rows * row_bytes)
        self._host = memory.view(DEPTH, rows, row_bytes)
        pin(memory, device, self)
        self._rows = torch.empty(DEPTH, rows, row_bytes, dtype=torch.uint8, device=device)
        # Draws of the batch, then samples of its rows, in one small copy.
        self._numbers = torch.empty(DEPTH, 2 * rows, dtype=torch.int64, device=device)
        self._host_numbers = torch.empty(DEPTH, 2 * rows, dtype=torch.int64, pin_memory=cuda)
        # Blocking events let the waiting thread sleep instead of spinning on a core that workers could use.
        self._copied = [self._torch.Event(**({"blocking": True} if cuda else {})) for _ in range(DEPTH)]
        self._consumed = [self._torch.Event() for _ in range(DEPTH)]
        # The buffers may be recycled memory on which earlier work is still queued.
        self._stream.wait_stream(self._torch.current_stream(device))

    def stream(self, assemble: Assemble, leaves_of: Callable[..., list[torch.Tensor]]) -> Generator[Leaves, None, None]:
        """What ``leaves_of`` makes of each batch, its rows, draws and samples on the device, and the draws.

        Whatever ends it, the thread has ended.
        """
        free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        ready: queue.SimpleQueue[tuple[int, HostRows] | BaseException | None] = queue.SimpleQueue()
        for position in range(DEPTH):
            free.put(position)
        given = (assemble, free, ready)
        thread = threading.Thread(target=self._feed, args=given, name="fulltilt-feed", daemon=True)
        thread.start()

        def end(timeout_s: float | None = None) -> None:
            free.put(None)
            thread.join(timeout_s)

        atexit.register(end, 5.0)  # the thread must not outlive the driver
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                position, batch = item
                self._torch.current_stream(self.device).wait_event(self._copied[position])
                count, samples = len(batch.draws), len(batch.samples)
                numbers, rows = self._numbers[position], len(batch.samples if batch.scattered else batch.rows)
                draws = numbers[:count].clone()  # the caller may keep it beyond the life of the buffer
                leaves = leaves_of(batch, self._rows[position, :rows], draws, numbers[count : count + samples])
                self._consumed[position].record(self._torch.current_stream(self.device))
                free.put(position)
                yield leaves, draws
        finally:
            atexit.unregister(end)
            end()

    def _feed(self, assemble: Assemble, free: Any, ready: Any) -> None:
        position = 0

        def buffer() -> torch.Tensor:
            nonlocal position
            taken = free.get()
            if taken is None:
                raise _Left
            position = taken
            self._copied[position].synchronize()
            return self._host[position]

        try:
            if self._cuda:
                torch.cuda.set_device(self.device)
                cuda_capture.use_thread_local_mode()
            with contextlib.closing(assemble(buffer)) as assembled:
                for batch in assembled:
                    self._copy(position, batch)
                    ready.put((position, batch))
            ready.put(None)
        except _Left:
            pass
        except BaseException as error:  # raised again where the batches are used
            ready.put(error)
        finally:
            if self._cuda:
                self._stream.synchronize()  # the store that was copied from may be given back now

    def _copy(self, position: int, batch: HostRows) -> None:
        count, samples = len(batch.draws), len(batch.samples)
        host = self._host_numbers[position, : count + samples]
        host[:count] = batch.draws
        host[count:] = batch.samples
        with self._torch.stream(self._stream):
            self._stream.wait_event(self._consumed[position])
            self._numbers[position, : count + samples].copy_(host, non_blocking=True)
            if batch.scattered:
                for target, sample in zip(self._rows[position], batch.samples.tolist(), strict=False):
                    target.copy_(batch.rows[sample], non_blocking=True)
            elif len(batch.rows):
                self._rows[position, : len(batch.rows)].copy_(batch.rows, non_blocking=True)
            self._copied[position].record(self._stream)


class DeviceBatches:
    """Takes batches of sample numbers to the device, in order. The tensors belong to the caller."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._ring: DeviceRing | None = None
        self.copies_ahead = device.type == "cuda"  # on a CPU there is nothing to copy to

    def batches(self, supply: SampleCache, batches: list[torch.Tensor], epoch: int) -> Iterator[Leaves]:
        """The leaves of each batch, from wherever its samples are."""
        if supply.store is not None and supply.store.on_device:
            lacking = supply.lacking(batches)
            # What drop_last, or a tier chosen in mid-epoch, left out of the passes before is read first: a batch from
            # the device alone needs no thread that assembles it, and with one a host that can hardly keep up with its
            # GPU is a third slower.
            few = len(lacking) <= READ_FIRST_BATCHES * supply.batch_size and 2 * len(lacking) <= sum(map(len, batches))
            if len(lacking) and few:
                for _ in self._from_source(supply, list(torch.split(lacking, supply.batch_size)), epoch):
                    pass
                lacking = supply.lacking(batches)
            if supply.store is not None and not len(lacking):
                return self._resident(supply.store, [supply.bad.without_bad(batch) for batch in batches])
        return self._from_source(supply, batches, epoch)

    def close(self) -> None:
        """Give the buffers back."""
        self._ring = None

    def _resident(self, store: Store, batches: list[torch.Tensor]) -> Iterator[Leaves]:
        """Batches of a complete device store: one upload of indices for the epoch, then one gather a batch."""
        if batches:
            draws, sizes = torch.cat(batches), [len(batch) for batch in batches]
            samples = sample_of(draws)
            indices = torch.split(samples.to(self._device), sizes)
            numbers = indices if torch.equal(samples, draws) else torch.split(draws.to(self._device), sizes)
            for picked, drawn in zip(indices, numbers, strict=True):
                yield [leaf.contiguous() for leaf in self._layout.split(store.gather(picked))], drawn

    def _from_source(self, supply: SampleCache, batches: list[torch.Tensor], epoch: int) -> Iterator[Leaves]:
        # Forked here, on the main thread, and not in the feeding thread.
        pool = supply.take_pool() if len(supply.lacking(batches)) else None
        # Without workers the data set runs in this process: on the thread that asks, whose random generators it may
        # use and which may draw from them at the same moment.
        ahead = self.copies_ahead and (pool is None or pool.workers)
        assemble = functools.partial(supply.host_rows, batches, epoch, pool)
        try:
            yield from (self._copied if ahead else self._here)(assemble, supply.batch_size)
        finally:
            if pool is not None:
                supply.give_back(pool)

    def _here(self, assemble: Assemble, batch_size: int) -> Iterator[Leaves]:
        buffer = functools.partial(torch.empty, batch_size, self._layout.row_bytes, dtype=torch.uint8)
        with contextlib.closing(assemble(buffer)) as assembled:
            for batch in assembled:
                rows = batch.rows[batch.samples] if batch.scattered else batch.rows
                here = [part.to(self._device) for part in (rows, batch.draws, batch.samples)]
                yield self._leaves(batch, *here), here[1]

    def _copied(self, assemble: Assemble, batch_size: int) -> Iterator[Leaves]:
        # Taken out while it is in use: a second iterator at the same time gets buffers of its own.
        ring, self._ring = self._ring, None
        if ring is None or ring.rows < batch_size:
            ring = DeviceRing(batch_size, self._layout.row_bytes, self._device)
        try:
            with contextlib.closing(ring.stream(assemble, self._leaves)) as arriving:
                yield from arriving
        finally:
            self._ring = ring

    def _leaves(
        self, batch: HostRows, rows: torch.Tensor, draws: torch.Tensor, samples: torch.Tensor
    ) -> list[torch.Tensor]:
        """The leaves of a batch as tensors of the caller's own; rows that a device store lacks go into it first."""
        if batch.store is not None:
            if len(samples):
                batch.store.write(batch.samples, rows, samples)
            rows = batch.store.gather(sample_of(draws))
        return [leaf.clone(memory_format=torch.contiguous_format) for leaf in self._layout.split(rows)]
