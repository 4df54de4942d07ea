"""HDF5 files above memory: blocks in random order, mixed group by group, the next group read while one is used."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fulltilt.errors import DataError
from fulltilt.feed.hdf5_arrival import block_pool
from fulltilt.feed.hdf5_blocks import DAMAGED, Block, BlockReader, Source
from fulltilt.feed.order import Order
from fulltilt.feed.pool import WorkerPool


@dataclass
class Rows:
    """Rows of several blocks on the device, where in them each sample begins, and the samples' numbers in the whole."""

    columns: list[torch.Tensor]
    first_rows: torch.Tensor
    numbers: torch.Tensor

    def used_on(self, stream: Any) -> None:
        """Keep the memory until what ``stream`` has queued is done: it was allocated for another one."""
        for tensor in (*self.columns, self.first_rows, self.numbers):
            tensor.record_stream(stream)


Piece = tuple[Rows, torch.Tensor]


class BlockStream:
    """The batches of an epoch, each as pieces: rows and the picks among them."""

    def __init__(
        self, source: Source, blocks: list[Block], blocks_per_group: int, device: torch.device, workers: int
    ) -> None:
        self.source, self.blocks, self.device = source, blocks, device
        self._per_group = blocks_per_group
        self._workers = workers

    def batches(self, order: Order, epoch: int, first: int, most: int) -> Iterator[list[Piece]]:
        """Up to ``most`` batches of ``epoch``, those from number ``first`` on; groups used up before are not read."""
        generator = torch.Generator().manual_seed(order.seed + epoch)
        count, size = len(self.blocks), order.batch_size
        chosen = torch.randperm(count, generator=generator) if order.shuffle else torch.arange(count)
        mine = chosen[order.rank :: order.world_size].tolist()
        groups = [mine[start : start + self._per_group] for start in range(0, len(mine), self._per_group)]
        picks = []
        for group in groups:
            total = sum(self.blocks[number].samples for number in group)
            picks.append(torch.randperm(total, generator=generator) if order.shuffle else torch.arange(total))
        used = first * size
        while groups and used >= len(picks[0]):
            used -= len(picks.pop(0))
            groups.pop(0)
        if picks:
            picks[0] = picks[0][used:]
        left = most - first
        pieces: list[Piece] = []
        stream = self._groups(groups)
        try:
            for rows, mixed_on_host in zip(stream, picks, strict=True):
                mixed = mixed_on_host.to(self.device)
                while len(mixed) and left:
                    # A batch that one group cannot fill is completed from the next: no sample is left out.
                    missing = size - sum(len(part) for _, part in pieces)
                    pieces.append((rows, mixed[:missing]))
                    mixed = mixed[missing:]
                    if sum(len(part) for _, part in pieces) == size:
                        left -= 1
                        yield pieces
                        pieces = []
                if not left:
                    return
            if pieces:
                yield pieces
        finally:
            stream.close()

    def _groups(self, groups: list[list[int]]) -> Generator[Rows, None, None]:
        """Groups on the device; one is read ahead by a thread while the one before it is used."""
        reader = BlockReader(self.source, self.blocks)
        ready: queue.Queue[Rows | BaseException | None] = queue.Queue(maxsize=1)
        stopped = threading.Event()
        pool = block_pool(reader, self._workers, self.device)
        cuda = self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]

        def read() -> None:
            try:
                for group in groups:
                    made = self._read_group(reader, pool, group, stream)
                    while not stopped.is_set():
                        try:
                            ready.put(made, timeout=0.1)
                            break
                        except queue.Full:
                            continue
                    if stopped.is_set():
                        return
                ready.put(None)
            except BaseException as error:  # raised again where the batches are used
                ready.put(error)

        thread = threading.Thread(target=read, name="fulltilt-hdf5", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                if cuda:
                    item.used_on(torch.cuda.current_stream(self.device))
                yield item
        finally:
            stopped.set()
            while thread.is_alive():
                try:
                    ready.get(timeout=0.05)
                except queue.Empty:
                    continue
            pool.close()

    def _read_group(self, reader: BlockReader, pool: WorkerPool, group: list[int], stream: Any) -> Rows:
        blocks = [self.blocks[number] for number in group]
        total = sum(block.rows for block in blocks)
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            # Fresh memory for each group: two are alive at a time, and the allocator reuses the one before.
            columns = [torch.empty((total, *c.shape), dtype=c.dtype, device=self.device) for c in self.source.columns]
            offset = 0
            for slot in pool.stream((torch.tensor([number]) for number in group), 0):
                if slot.failures:
                    raise DataError(slot.failures[0].message, DAMAGED)
                block = self.blocks[int(slot.indices[0])]
                for column, (_, part) in zip(columns, reader.parts(block, slot.rows[0]), strict=True):
                    column[offset : offset + block.rows].copy_(part)
                offset += block.rows
                pool.release(slot)
            first, numbers = _samples_of(blocks, self.source.stride)
            # Every copy above has waited for its end: the group is whole, on whatever stream it is used.
            return Rows(columns, first.to(self.device), numbers.to(self.device))


def _samples_of(blocks: list[Block], stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each sample begins in the rows of ``blocks`` laid end to end, and its number in the whole."""
    first, numbers, before = [], [], 0
    for block in blocks:
        first.append(before + torch.arange(block.samples) * stride)
        numbers.append(block.first_sample + torch.arange(block.samples))
        before += block.rows
    return torch.cat(first), torch.cat(numbers)
