"""Host memory in which batches are put together before they are copied to the GPU."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fulltilt.feed.memory import pin, shared_bytes

# One being filled, one being copied, one ready.
COUNT = 3

Buffer = tuple[torch.Tensor, Callable[[], None]]  # rows to fill, and what to call when they were copied away


class HostBuffers:
    """A few host buffers [rows, row_bytes] that are handed out in turn, pinned as long as this object lives."""

    @torch.inference_mode(False)  # made in an evaluation, they have to be of use to the feeding thread
    def __init__(self, rows: int, row_bytes: int, device: torch.device) -> None:
        self._memory = shared_bytes(COUNT * rows * row_bytes)
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for buffer in self._memory.view(COUNT, rows, row_bytes):
            self._free.put(buffer)
        pin(self._memory, device, self)

    def take(self) -> Buffer:
        """A free buffer; waits for one."""
        buffer = self._free.get()
        return buffer, lambda: self._free.put(buffer)


class Staging:
    """Buffers for each pass over a data set: of some that all passes shared, one put aside would keep too many.

    A pass that ends leaves its own to the next.
    """

    def __init__(self, rows: int, row_bytes: int, device: torch.device) -> None:
        self._rows, self._row_bytes, self._device = rows, row_bytes, device
        self.copies_from = device.type == "cuda"  # elsewhere what was put together is the batch itself
        self._spare: deque[HostBuffers] = deque(maxlen=1)

    @contextmanager
    def for_a_pass(self) -> Iterator[Callable[[], Buffer]]:
        """What gives a free buffer each time that it is called."""
        mine: HostBuffers | None = None

        def free() -> Buffer:
            nonlocal mine
            if not self.copies_from:
                return torch.empty(self._rows, self._row_bytes, dtype=torch.uint8), _nothing
            if mine is None:
                mine = self._left_over() or HostBuffers(self._rows, self._row_bytes, self._device)
            return mine.take()

        try:
            yield free
        finally:
            if mine is not None:
                self._spare.append(mine)

    def _left_over(self) -> HostBuffers | None:
        try:
            return self._spare.pop()  # in one go: passes run on threads of their own
        except IndexError:
            return None


def _nothing() -> None:
    return None
