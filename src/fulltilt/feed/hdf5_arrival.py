"""Rows of HDF5 files that stay in memory: read once, block by block, while the first epoch trains on what is there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fulltilt import captures
from fulltilt.errors import DataError
from fulltilt.feed.draws import mix
from fulltilt.feed.hdf5_blocks import DAMAGED, Block, Source
from fulltilt.feed.hdf5_pool import BlockPool, block_pool
from fulltilt.feed.hdf5_reader import BlockReader
from fulltilt.feed.threads import end_at_exit

# Seeds of their own: those next to the run's are the orders of the epochs that follow.
_BLOCKS, _SAMPLES = 1, 2


class ArrivalOrder:
    """The order of the epoch in which the rows arrive: blocks in random order, their samples mixed group by group.

    It depends on the seed alone, so that a resume in this epoch goes on with the same batches.
    """

    def __init__(self, blocks: list[Block], blocks_per_group: int, seed: int, *, shuffle: bool) -> None:
        self._blocks, self._seed, self._shuffle = blocks, seed, shuffle
        generator = torch.Generator().manual_seed(mix(seed, _BLOCKS))
        order = (torch.randperm(len(blocks), generator=generator) if shuffle else torch.arange(len(blocks))).tolist()
        self.groups = [order[start : start + blocks_per_group] for start in range(0, len(order), blocks_per_group)]
        counts = torch.tensor([sum(blocks[number].samples for number in group) for group in self.groups])
        self._ends = counts.cumsum(0)

    def indices(self) -> torch.Tensor:
        """Every sample's number once, in this order."""
        generator = torch.Generator().manual_seed(mix(self._seed, _SAMPLES))
        parts = []
        for group in self.groups:
            blocks = [self._blocks[number] for number in group]
            numbers = torch.cat([block.first_sample + torch.arange(block.samples) for block in blocks])
            parts.append(numbers[torch.randperm(len(numbers), generator=generator)] if self._shuffle else numbers)
        return torch.cat(parts)

    def group_at(self, position: int) -> int:
        """The group of the sample at ``position`` of the order."""
        return int(torch.searchsorted(self._ends, position, right=True).clamp(max=len(self.groups) - 1))


class ResidentRows:
    """Every row in one tensor a key, on the device or in host memory (``where``), read in the background."""

    @torch.inference_mode(False)  # made in an evaluation, it has to be of use to the reading thread
    def __init__(
        self, source: Source, blocks: list[Block], where: torch.device, device: torch.device, workers: int
    ) -> None:
        self.columns = [
            torch.empty((source.total_rows, *column.shape), dtype=column.dtype, device=where)
            for column in source.columns
        ]
        self.first_rows = source.first_rows().to(where)
        self._reader = BlockReader(source, blocks)
        self._where, self._device, self._workers = where, device, workers
        self._missing = set(range(len(blocks)))
        self._arrived = threading.Condition()
        self._failed: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    @property
    def complete(self) -> bool:
        """Whether every row is in."""
        return not self._missing

    def begin(self, order: Iterable[int]) -> None:
        """Read the blocks in this order, in the background; does nothing when that has begun."""
        if self._thread is not None:
            return
        # The workers are forked here, on the caller's thread, and not in the one that reads.
        pool = block_pool(self._reader, self._workers, self._device)
        started = None
        if self._where.type == "cuda":
            started = torch.cuda.Event()  # type: ignore[no-untyped-call]
            started.record(torch.cuda.current_stream(self._where))
        arguments = (pool, list(order), started)
        self._thread = threading.Thread(target=self._read, args=arguments, name="fulltilt-hdf5", daemon=True)
        self._forget = end_at_exit(self.close)
        self._thread.start()

    def wait_for(self, blocks: Iterable[int]) -> None:
        """Return when these blocks are in. Raises DataError for a damaged file."""
        wanted = set(blocks)
        with self._arrived:
            self._arrived.wait_for(lambda: self._failed is not None or not (wanted & self._missing))
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """End the reading and give the memory back."""
        self._stopped = True
        if self._thread is not None:
            self._forget()
            self._thread.join()
        self.columns = []

    def _read(self, pool: BlockPool, order: list[int], started: Any) -> None:
        try:
            with contextlib.closing(pool), self._side_stream(started) as stream:
                for slot in pool.stream((torch.tensor([number]) for number in order), 0):
                    if self._stopped:
                        return
                    number = int(slot.indices[0])
                    if slot.failures:
                        raise DataError(slot.failures[0].message, DAMAGED)
                    self._place(number, slot.rows[0])
                    if stream is not None:
                        stream.synchronize()  # only then are the rows there, for every stream
                    pool.release(slot)
                    with self._arrived:
                        self._missing.discard(number)
                        self._arrived.notify_all()
        except BaseException as error:  # raised again where the rows are waited for
            with self._arrived:
                self._failed = error
                self._arrived.notify_all()

    def _place(self, number: int, row: torch.Tensor) -> None:
        block = self._reader.blocks[number]
        for column, (_, part) in zip(self.columns, self._reader.parts(block, row), strict=True):
            column[block.global_row : block.global_row + block.rows].copy_(part, non_blocking=True)

    @contextlib.contextmanager
    def _side_stream(self, started: Any) -> Iterator[Any]:
        """A stream on which copies do not queue behind the training's work."""
        if started is None:
            yield None
            return
        torch.cuda.set_device(self._where)
        captures.leave_alone()
        stream: Any = torch.cuda.Stream(self._where)  # type: ignore[no-untyped-call]
        stream.wait_event(started)  # the columns may be recycled memory on which earlier work is still queued
        with torch.cuda.stream(stream):
            yield stream
