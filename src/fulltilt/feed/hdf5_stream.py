"""HDF5 files above memory: blocks in random order, mixed group by group, the next group read while one is used.

One thread takes blocks from the pool to the device without a pause between groups or epochs: when the last group of an
epoch is handed out, the first ones of the next epoch are already being read.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fulltilt import captures
from fulltilt.errors import DataError
from fulltilt.feed.draws import mix
from fulltilt.feed.hdf5_blocks import DAMAGED, Block, Source
from fulltilt.feed.hdf5_pool import BlockPool, block_pool
from fulltilt.feed.hdf5_reader import BlockReader
from fulltilt.feed.order import Order
from fulltilt.feed.threads import end_at_exit


@dataclass
class Rows:
    """Rows of several blocks on the device, where in them each sample begins, and the samples' numbers in the whole.

    ``picks`` is the order in which the samples are used.
    """

    columns: list[torch.Tensor]
    first_rows: torch.Tensor
    numbers: torch.Tensor
    picks: torch.Tensor

    def used_on(self, stream: Any) -> None:
        """Keep the memory until what ``stream`` has queued is done: it was allocated for another one."""
        for tensor in (*self.columns, self.first_rows, self.numbers, self.picks):
            tensor.record_stream(stream)


Piece = tuple[Rows, torch.Tensor]


@dataclass(frozen=True)
class _Part:
    """Samples ``first`` up to ``end`` of block number ``block``, counted within it: two ranks may share one."""

    block: int
    first: int
    end: int

    @property
    def samples(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class _Group:
    """What is mixed with each other, the seed of the mixing, and how many picks an earlier run has used."""

    parts: list[_Part]
    seed: int | None
    used: int = 0


class BlockStream:
    """The batches of an epoch, each as pieces: rows and the picks among them."""

    def __init__(
        self, source: Source, blocks: list[Block], blocks_per_group: int, device: torch.device, workers: int
    ) -> None:
        self.source, self.blocks, self.device = source, blocks, device
        self._per_group = blocks_per_group
        self._workers = workers
        self._reader: BlockReader | None = None
        self._idle: list[BlockPool] = []  # pools that no pass is using: an iterator put aside keeps its own
        self._closed = False
        self._stream: Any = None
        self._ahead: tuple[tuple[Order, int, int], _Reading] | None = None

    def batches(self, order: Order, epoch: int, first: int, most: int) -> Iterator[list[Piece]]:
        """Up to ``most`` batches of ``epoch``, those from number ``first`` on; groups used up before are not read."""
        size, left = order.batch_size, most - first
        reading = self._reading(order, epoch, first)
        pieces: list[Piece] = []
        try:
            for rows in reading:
                if reading.finished and self._ahead is None:  # the next epoch is read while the last group is used
                    self._ahead = (order, epoch + 1, 0), self._begin(order, epoch + 1, 0)
                mixed = rows.picks
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
            reading.stop()

    def batches_per_epoch(self, order: Order) -> int:
        """How many batches every rank has in every epoch."""
        share = self.source.samples // order.world_size
        return share // order.batch_size if order.drop_last else -(-share // order.batch_size)

    def close(self) -> None:
        """End the reading and give the memory back."""
        self._closed = True
        if self._ahead is not None:
            self._ahead[1].stop()
            self._ahead = None
        while self._idle:
            self._idle.pop().close()

    def _give_back(self, pool: BlockPool) -> None:
        if self._closed:
            pool.close()
        elif not pool.closed:
            self._idle.append(pool)

    # ----------------------------------------------------------------- which groups

    def _groups(self, order: Order, epoch: int, first: int) -> list[_Group]:
        """The groups of this rank that are left after ``first`` batches."""
        count, seed = len(self.blocks), mix(order.seed, epoch)
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(count, generator=generator) if order.shuffle else torch.arange(count)
        mine = self._share(chosen.tolist(), order)
        used, groups = first * order.batch_size, []
        for start in range(0, len(mine), self._per_group):
            group = mine[start : start + self._per_group]
            samples = sum(part.samples for part in group)
            if used < samples:
                groups.append(_Group(group, mix(seed, start) if order.shuffle else None, used))
            used = max(0, used - samples)
        return groups

    def _share(self, chosen: list[int], order: Order) -> list[_Part]:
        """This rank's run of the ``chosen`` blocks. Every rank has equally many samples, whatever the blocks' sizes."""
        share = self.source.samples // order.world_size
        begin, end = order.rank * share, (order.rank + 1) * share
        mine, before = [], 0
        for number in chosen:
            samples = self.blocks[number].samples
            part = _Part(number, max(0, begin - before), min(samples, end - before))
            if part.samples > 0:
                mine.append(part)
            before += samples
        return mine

    def _reading(self, order: Order, epoch: int, first: int) -> _Reading:
        """The thread that reads this epoch: the one that has begun already, or a new one."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead[0] == (order, epoch, first):
                return ahead[1]
            ahead[1].stop()
        return self._begin(order, epoch, first)

    # ----------------------------------------------------------------- reading

    def _begin(self, order: Order, epoch: int, first: int) -> _Reading:
        self._closed = False
        if self._reader is None:
            self._reader = BlockReader(self.source, self.blocks)
        reader, groups = self._reader, self._groups(order, epoch, first)
        if not groups:
            return _Reading(lambda: iter(()), 0)
        # Workers are forked here, on the caller's thread, and not in the one that reads.
        pool = self._idle.pop() if self._idle else block_pool(reader, self._workers, self.device)

        def read() -> Iterator[Rows]:
            try:
                yield from self._read(groups, reader, pool)
            except Exception:
                pool.close()  # of no further use
                raise
            finally:
                self._give_back(pool)

        return _Reading(read, len(groups))

    def _read(self, groups: list[_Group], reader: BlockReader, pool: BlockPool) -> Iterator[Rows]:
        """The groups on the device, one after the other out of one stream of blocks."""
        numbers = (torch.tensor([part.block]) for group in groups for part in group.parts)
        with contextlib.closing(pool.stream(numbers, 0)) as slots, self._side_stream() as stream:
            for group in groups:
                blocks = [self.blocks[part.block] for part in group.parts]
                total = sum(block.rows for block in blocks)
                # Fresh memory for each group: three are alive at a time, and the allocator reuses the one before.
                columns = [
                    torch.empty((total, *c.shape), dtype=c.dtype, device=self.device) for c in self.source.columns
                ]
                offset = 0
                for block in blocks:
                    slot = next(slots)
                    if slot.failures:
                        raise DataError(slot.failures[0].message, DAMAGED)
                    for column, (_, part) in zip(columns, reader.parts(block, slot.rows[0]), strict=True):
                        column[offset : offset + block.rows].copy_(part, non_blocking=True)
                    offset += block.rows
                    if stream is not None:
                        stream.synchronize()  # the slot is filled again at once
                    pool.release(slot)
                rows = Rows(columns, *self._picks(group, blocks))
                if stream is not None:
                    stream.synchronize()  # now the group is whole, on whatever stream it is used
                yield rows

    def _picks(self, group: _Group, blocks: list[Block]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where each sample begins in the rows of ``blocks`` end to end, its number in the whole, and the order."""
        first, numbers, before = [], [], 0
        for block, part in zip(blocks, group.parts, strict=True):
            inside = torch.arange(part.first, part.end)
            first.append(before + inside * self.source.stride)
            numbers.append(block.first_sample + inside)
            before += block.rows
        samples = sum(part.samples for part in group.parts)
        order = torch.arange(samples)
        if group.seed is not None:
            order = torch.randperm(samples, generator=torch.Generator().manual_seed(group.seed))
        made = torch.cat(first), torch.cat(numbers), order[group.used :]
        return made[0].to(self.device), made[1].to(self.device), made[2].to(self.device)

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[Any]:
        """A stream on which copies do not queue behind the training's work."""
        if self.device.type != "cuda":
            yield None
            return
        torch.cuda.set_device(self.device)
        captures.leave_alone()
        if self._stream is None:  # one for all epochs: memory that was allocated on a stream is reused on it alone
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield self._stream


class _Reading:
    """Groups read by a thread of its own; one waits to be used while the next is read."""

    def __init__(self, read: Callable[[], Iterator[Rows]], groups: int) -> None:
        self._left = groups
        self._ready: queue.Queue[Rows | BaseException] = queue.Queue(maxsize=1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(read,), name="fulltilt-hdf5", daemon=True)
        self._forget = end_at_exit(self.stop)
        if groups:
            self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether the last group was handed out: the thread reads no more."""
        return not self._left

    def __iter__(self) -> Iterator[Rows]:
        while self._left:
            item = self._ready.get()
            if isinstance(item, BaseException):
                raise item
            self._left -= 1
            if self.finished:
                self._thread.join()
            if item.picks.is_cuda:
                item.used_on(torch.cuda.current_stream(item.picks.device))
            yield item

    def stop(self) -> None:
        """End the thread; what it has read is dropped."""
        self._forget()
        self._stopped.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._ready.get(timeout=0.05)

    def _run(self, read: Callable[[], Iterator[Rows]]) -> None:
        try:
            with contextlib.closing(read()) as groups:  # type: ignore[type-var]
                for rows in groups:
                    self._hand_over(rows)
                    if self._stopped.is_set():
                        return
        except BaseException as error:  # raised again where the batches are used
            self._hand_over(error)

    def _hand_over(self, item: Rows | BaseException) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return
