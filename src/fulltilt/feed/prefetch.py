"""Batches copied to the device ahead of their use, on a stream of their own, through a fixed ring of buffers.

The allocator plays no part while training: the ring is allocated once. Three events keep its users apart:
 1. ``copied``: the compute stream waits for it before it reads a buffer;
 2. ``consumed``: the copy stream waits for it before it overwrites the buffer;
 3. the host waits for ``copied`` (in the feeding thread) before the host memory is filled again.
On a CPU device the same thread and ring run without streams.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fulltilt import cuda_capture
from fulltilt.feed.threads import end_at_exit


@dataclass
class HostBatch:
    """A batch, or the part of it that is not on the device yet, in host memory.

    ``release`` is called when ``rows`` was copied away. ``store`` is handed through to the consumer. ``scattered``:
    ``rows`` is a whole pinned store, and the batch is its rows ``row_indices``.
    """

    indices: torch.Tensor
    rows: torch.Tensor
    row_indices: torch.Tensor
    release: Callable[[], None] = field(default=lambda: None)
    store: Any = None
    scattered: bool = False


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
