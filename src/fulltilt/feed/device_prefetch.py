"""Batches copied to the device ahead of their use, on a stream of their own, through a fixed ring of buffers.

The allocator plays no part while training: the ring is allocated once. Three events keep its users apart:
 1. ``copied``: the compute stream waits for it before it reads a buffer;
 2. ``consumed``: the copy stream waits for it before it overwrites the buffer;
 3. the host waits for ``copied`` (in the feeding thread) before the host memory is filled again.
On a CPU device the same thread and ring run without streams.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fulltilt import cuda_capture
from fulltilt.feed.epoch_order import sample_of
from fulltilt.feed.row_reader import HostBatch, RowReader
from fulltilt.feed.sample_layout import Layout
from fulltilt.feed.storage import DeviceStore


@dataclass
class DeviceBatch:
    """The same on the device. ``rows`` is a buffer of the ring: valid until ``done`` is called."""

    indices: torch.Tensor
    rows: torch.Tensor
    row_indices: torch.Tensor
    store: Any
    host: HostBatch
    done: Callable[[], None]


class DeviceRing:
    """A fixed number of device buffers that a feeding thread fills in turn."""

    def __init__(self, rows: int, row_bytes: int, device: torch.device, depth: int = 3) -> None:
        self.device = device
        self.rows = rows
        self.depth = depth
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._rows = torch.empty(depth, rows, row_bytes, dtype=torch.uint8, device=device)
        # Indices of the batch, then indices of its rows, in one small copy.
        self._indices = torch.empty(depth, 2 * rows, dtype=torch.int64, device=device)
        self._host_indices = torch.empty(depth, 2 * rows, dtype=torch.int64, pin_memory=cuda)
        # Blocking events let the waiting thread sleep instead of spinning on a core that workers could use.
        self._copied = [_event(blocking=True) if cuda else None for _ in range(depth)]
        self._consumed = [_event() if cuda else None for _ in range(depth)]
        if self._stream is not None:
            # The buffers may be recycled memory on which earlier work is still queued.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def stream(self, batches: Iterator[HostBatch]) -> Generator[DeviceBatch, None, None]:
        """``batches`` on the device, in order. Whatever ends it, the thread has ended and ``batches`` is closed."""
        free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        ready: queue.SimpleQueue[tuple[int, HostBatch] | BaseException | None] = queue.SimpleQueue()
        for position in range(self.depth):
            free.put(position)
        thread = threading.Thread(target=self._feed, args=(batches, free, ready), name="fulltilt-feed", daemon=True)
        thread.start()

        def end(timeout_s: float | None = 5.0) -> None:
            free.put(None)
            thread.join(timeout_s)

        forget = end_at_exit(end)
        try:
            while True:
                item = ready.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                position, batch = item
                yield self._arrived(position, batch, free)
        finally:
            forget()
            end(None)

    def _arrived(self, position: int, batch: HostBatch, free: queue.SimpleQueue[int | None]) -> DeviceBatch:
        copied = self._copied[position]
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

        def done() -> None:
            event = self._consumed[position]
            if event is not None:
                event.record(torch.cuda.current_stream(self.device))
            free.put(position)

        count, rows = len(batch.indices), len(batch.row_indices)
        indices = self._indices[position]
        return DeviceBatch(
            indices=indices[:count].clone(),  # the caller may keep it beyond the life of the buffer
            rows=self._rows[position, :rows],
            row_indices=indices[count : count + rows],
            store=batch.store,
            host=batch,
            done=done,
        )

    def _feed(self, batches: Iterator[HostBatch], free: Any, ready: Any) -> None:
        copying: deque[tuple[Any, HostBatch]] = deque()
        try:
            if self._stream is not None:
                torch.cuda.set_device(self.device)
                cuda_capture.use_thread_local_mode()
            for batch in batches:
                position = free.get()
                if position is None:
                    batch.release()
                    return
                copying.append((self._copy(position, batch), batch))
                ready.put((position, batch))
                # All but the newest copy: that one overlaps with making the next batch.
                while len(copying) > 1:
                    _finish(*copying.popleft())
            ready.put(None)
        except BaseException as error:  # raised again where the batches are used
            ready.put(error)
        finally:
            for item in copying:
                _finish(*item)
            close = getattr(batches, "close", None)
            if close is not None:
                close()

    def _copy(self, position: int, batch: HostBatch) -> Any:
        count, rows = len(batch.indices), len(batch.row_indices)
        host = self._host_indices[position]
        host[:count] = batch.indices
        host[count : count + rows] = batch.row_indices
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            consumed, copied = self._consumed[position], self._copied[position]
            if self._stream is not None and consumed is not None:
                self._stream.wait_event(consumed)
            self._indices[position, : count + rows].copy_(host[: count + rows], non_blocking=True)
            if batch.scattered:
                for buffer, index in zip(self._rows[position], batch.row_indices.tolist(), strict=False):
                    buffer.copy_(batch.rows[index], non_blocking=True)
            elif rows:
                self._rows[position, :rows].copy_(batch.rows[:rows], non_blocking=True)
            if copied is not None:
                copied.record(self._stream)
        return copied


def _event(**options: bool) -> torch.cuda.Event:
    return torch.cuda.Event(**options)  # type: ignore[no-untyped-call]


def _finish(copied: Any, batch: HostBatch) -> None:
    if copied is not None:
        copied.synchronize()
    batch.release()


_ends: list[Callable[[], object]] = []


def end_at_exit(end: Callable[[], object]) -> Callable[[], None]:
    """Let ``end`` be called when the interpreter ends; returns what takes that back."""
    _ends.append(end)

    def forget() -> None:
        with contextlib.suppress(ValueError):
            _ends.remove(end)

    return forget


@atexit.register
def _end_all() -> None:
    for end in list(_ends):
        with contextlib.suppress(Exception):
            end()


Leaves = tuple[list[torch.Tensor], torch.Tensor]  # the leaves of a batch, and the numbers of its draws on the device


class DeviceBatches:
    """Takes batches of sample numbers to the device, in order. The tensors belong to the caller."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._ring: DeviceRing | None = None
        self.copies_ahead = device.type == "cuda"  # on a CPU there is nothing to copy to

    def batches(self, supply: RowReader, batches: list[torch.Tensor], epoch: int) -> Iterator[Leaves]:
        """The leaves of each batch, from wherever its samples are."""
        if len(batches) > 1 and isinstance(supply.store, DeviceStore):
            rest = supply.lacking(batches)
            # What drop_last left out of the passes before is read first: a batch from the device alone needs no thread
            # that assembles it, and with one a host that can hardly keep up with its GPU is a third slower.
            if 0 < len(rest) <= supply.batch_size:
                for _ in self._from_source(supply, [rest], epoch):
                    pass
        if isinstance(supply.store, DeviceStore) and not supply.missing(batches):
            return self._resident(supply.store, [supply.bad.without_bad(batch) for batch in batches])
        return self._from_source(supply, batches, epoch)

    def _from_source(self, supply: RowReader, batches: list[torch.Tensor], epoch: int) -> Iterator[Leaves]:
        # Without workers the data set runs in this process: on the thread that asks, whose random generators it may
        # use and which may draw from them at the same moment.
        ahead = self.copies_ahead and (supply.workers or not supply.missing(batches))
        return (self._copied if ahead else self._here)(supply, batches, epoch)

    def close(self) -> None:
        """Give the buffers back."""
        self._ring = None

    def _resident(self, store: DeviceStore, batches: list[torch.Tensor]) -> Iterator[Leaves]:
        """Batches of a complete device store: one upload of indices for the epoch, then one gather a tensor."""
        if batches:
            draws, sizes = torch.cat(batches), [len(batch) for batch in batches]
            samples = sample_of(draws)
            indices = torch.split(samples.to(self._device), sizes)
            numbers = indices if torch.equal(samples, draws) else torch.split(draws.to(self._device), sizes)
            for picked, drawn in zip(indices, numbers, strict=True):
                yield store.gather(picked), drawn

    def _here(self, supply: RowReader, batches: list[torch.Tensor], epoch: int) -> Iterator[Leaves]:
        host = supply.host_batches(batches, epoch)
        try:
            for batch in host:
                rows = batch.rows[batch.row_indices] if batch.scattered else batch.rows
                # Copies that wait for their end, because the rows are given back at once. On a CPU they are none.
                here = [part.to(self._device) for part in (rows, batch.indices, batch.row_indices)]
                leaves = self._take(batch, *here)
                batch.release()
                yield leaves, here[1]
        finally:
            host.close()

    def _copied(self, supply: RowReader, batches: list[torch.Tensor], epoch: int) -> Iterator[Leaves]:
        if supply.missing(batches):
            supply.start_workers()  # forked here, on the main thread, and not in the feeding thread
        # Taken out while it is in use: a second iterator at the same time gets buffers of its own.
        ring, self._ring = self._ring, None
        if ring is None or ring.rows < supply.batch_size:
            with torch.inference_mode(False):  # made in an evaluation, it has to be of use to the feeding thread
                ring = DeviceRing(supply.batch_size, self._layout.row_bytes, self._device)
        stream = ring.stream(supply.host_batches(batches, epoch))
        try:
            for arrived in stream:
                leaves = self._take(arrived.host, arrived.rows, arrived.indices, arrived.row_indices)
                arrived.done()
                yield leaves, arrived.indices
        finally:
            stream.close()
            self._ring = ring

    def _take(
        self, batch: HostBatch, rows: torch.Tensor, indices: torch.Tensor, row_indices: torch.Tensor
    ) -> list[torch.Tensor]:
        """The leaves of a batch as tensors of the caller's own; rows that a device store lacks go into it first."""
        store = batch.store
        if isinstance(store, DeviceStore):
            if len(row_indices):
                store.write(row_indices, rows)
                store.present[batch.row_indices] = True
            return store.gather(sample_of(indices))
        return [leaf.clone(memory_format=torch.contiguous_format) for leaf in self._layout.split(rows)]
