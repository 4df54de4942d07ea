"""Reading blocks ahead: with threads where a reader needs no lock, with worker processes where it does."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from fulltilt.feed.hdf5_reader import BlockReader
from fulltilt.feed.memory import pin, shared_bytes
from fulltilt.feed.pool import Slot, WorkerPool


class BlockPool(Protocol):
    """What the two kinds of pool have in common."""

    @property
    def closed(self) -> bool:
        """Whether it can read no more."""

    def stream(self, batches: Iterable[torch.Tensor], epoch: int) -> Generator[Slot, None, None]:
        """Slots filled with ``batches`` in their order. The caller hands each back with ``release``."""

    def release(self, slot: Slot) -> None:
        """The rows of ``slot`` were copied away; it may be filled again."""

    def close(self) -> None:
        """End the readers and give their memory back."""


def block_pool(reader: BlockReader, workers: int, device: torch.device) -> BlockPool:
    """A pool that reads whole blocks; more slots than readers, so that none waits for a copy."""
    if reader.past_library:
        return BlockThreads(reader, max(1, workers), device)
    slots = max(2, 2 * workers)
    return WorkerPool(reader, reader.block_bytes, 1, workers=workers, slots=slots, device=device)


class BlockThreads:
    """A WorkerPool of threads: they start at once, and hold no interpreter lock while they read or decompress."""

    @torch.inference_mode(False)  # made in an evaluation, its memory has to be of use to other threads
    def __init__(self, reader: BlockReader, threads: int, device: torch.device) -> None:
        slots = threads + 2
        self.closed = False
        self._reader = reader
        self._memory = shared_bytes(slots * reader.block_bytes)
        rows = self._memory.view(slots, 1, reader.block_bytes)
        self._free = deque(Slot(number, rows[number], torch.zeros(1, dtype=torch.int64)) for number in range(slots))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="fulltilt-hdf5")
        self.pinned = pin(self._memory, device, self)

    def stream(self, batches: Iterable[torch.Tensor], epoch: int) -> Generator[Slot, None, None]:
        """Slots filled with ``batches`` in their order. The caller hands each back with ``release``."""
        waiting: deque[tuple[Slot, Future[None]]] = deque()
        source = iter(batches)
        try:
            while True:
                while self._free and (batch := next(source, None)) is not None:
                    slot = self._free.popleft()
                    slot.indices.copy_(batch)
                    waiting.append((slot, self._threads.submit(self._fill, slot, epoch)))
                if not waiting:
                    return
                waiting[0][1].result()
                yield waiting.popleft()[0]
        finally:
            for slot, filled in waiting:
                if not filled.cancel():
                    filled.exception()  # only a finished slot can be used again
                self._free.append(slot)

    def release(self, slot: Slot) -> None:
        """The rows of ``slot`` were copied away; it may be filled again."""
        self._free.append(slot)

    def close(self) -> None:
        """End the threads."""
        self.closed = True
        self._threads.shutdown()

    def _fill(self, slot: Slot, epoch: int) -> None:
        slot.failures = self._reader.read(slot.indices, slot.rows, epoch)
