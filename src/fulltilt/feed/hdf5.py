"""``feed.hdf5``: batches from HDF5 files, resident where they fit, else shuffled within a stated window.

Resident: every row is read once, in large blocks, and lies on the device (or in host memory) as it is in the file;
overlapping windows are cut out of it by a gather, so that a row is stored once however many windows share it.
Above memory: blocks are drawn in random order, a group of them is mixed, and the next group is read meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fulltilt.errors import DataError, UsageError
from fulltilt.feed.augment import Augmentation, as_augmentation
from fulltilt.feed.caches import default_cache_dir
from fulltilt.feed.hdf5_blocks import DAMAGED, Block, BlockReader, Source, describe
from fulltilt.feed.order import Order
from fulltilt.feed.places import device_or_default, ranks
from fulltilt.feed.pool import WorkerPool
from fulltilt.feed.progress import progress
from fulltilt.feed.tiers import choose_tier, default_workers, measure_room

Residency = Literal["auto", "vram", "ram", "none"]
# Rows that are mixed with each other above memory: a gigabyte of them, unless the user asks for more.
MIXING_BYTES = 1024**3


def hdf5(
    files: Sequence[str | Path] | str | Path,
    keys: Sequence[str],
    batch_size: int,
    *,
    window: int | None = None,
    stride: int = 1,
    window_keys: Sequence[str] | None = None,
    part: tuple[float, float] = (0.0, 1.0),
    augment: Augmentation | Iterable[Any] | Callable[[Any], Any] | None = None,
    residency: Residency = "auto",
    shuffle: bool = True,
    drop_last: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    num_workers: int | None = None,
    mixing_rows: int | None = None,
    reserve_bytes: int | None = None,
) -> Hdf5Loader:
    """A loader whose batches are tuples of the ``keys``' tensors (one tensor for one key), on the device.

    ``window``: a sample is that many rows, ``stride`` apart; keys not in ``window_keys`` (default: the first) give the
    value at the window's last row. ``part``: which share of each file's rows, from and to. ``mixing_rows`` is the
    window of the shuffle above memory (``loader.mixing``). Raises UsageError, DataError.
    """
    source = describe(files, keys, window, stride, part)
    found_rank, found_world = ranks()
    order = Order(
        source.samples,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        rank=found_rank if rank is None else rank,
        world_size=found_world if world_size is None else world_size,
    )
    windowed = tuple(keys[:1]) if window_keys is None else tuple(window_keys)
    if unknown := set(windowed) - set(keys):
        raise UsageError(f"window_keys names {', '.join(sorted(unknown))}, which is not among the keys")
    return Hdf5Loader(
        source,
        order,
        windowed=windowed if window is not None else (),
        augment=as_augmentation(augment),
        residency=residency,
        device=device_or_default(device),
        workers=default_workers() if num_workers is None else num_workers,
        mixing_rows=mixing_rows,
        reserve_bytes=reserve_bytes,
    )


@dataclass
class _Group:
    """Rows of several blocks, and where in them each sample begins; samples by their numbers in the whole."""

    columns: list[torch.Tensor]
    first_rows: torch.Tensor
    numbers: torch.Tensor

    def numbers_of(self, picks: torch.Tensor) -> torch.Tensor:
        """The samples' numbers; a group of all samples numbers them itself."""
        return self.numbers[picks] if self.numbers.numel() else picks

    def used_on(self, stream: Any) -> None:
        """Keep the memory until what ``stream`` has queued is done: it was allocated for another one."""
        for tensor in (*self.columns, self.first_rows, self.numbers):
            tensor.record_stream(stream)


class Hdf5Loader:
    """What ``feed.hdf5`` returns. ``tier`` is where rows live; ``mixing`` how many samples a shuffle mixes (or all)."""

    def __init__(
        self,
        source: Source,
        order: Order,
        *,
        windowed: tuple[str, ...],
        augment: Augmentation | None,
        residency: Residency,
        device: torch.device,
        workers: int,
        mixing_rows: int | None,
        reserve_bytes: int | None,
    ) -> None:
        self.source, self.order, self.device = source, order, device
        self.workers = workers
        self._windowed = windowed
        self._augment = augment
        self._next_epoch = self._next_batch = 0
        self._resident: _Group | None = None
        self._upcoming: tuple[int, Future[torch.Tensor]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fulltilt-order")
        self._blocks = source.blocks()
        room = measure_room(device, default_cache_dir(), reserve_bytes=reserve_bytes)
        choice = choose_tier(source.total_rows * source.row_bytes, room, residency)
        self.tier = "none" if choice.tier in ("disk", "none") else "vram" if choice.tier == "vram" else "ram"
        if self.tier == "ram" and device.type == "cuda" and residency == "auto":
            self.tier = "none"  # a gather in host memory is slower than reading blocks ahead
        per_group = mixing_rows or max(1, MIXING_BYTES // source.row_bytes)
        self._blocks_per_group = max(1, min(len(self._blocks), per_group // max(block.rows for block in self._blocks)))
        largest = sorted((block.samples for block in self._blocks), reverse=True)
        self.mixing = source.samples if self.tier != "none" else sum(largest[: self._blocks_per_group])

    def __len__(self) -> int:
        size, world = self.order.batch_size, self.order.world_size
        if self.tier != "none" or world == 1:
            return self.order.batches_per_epoch()
        # Ranks draw whole blocks, other ones in each epoch; this many samples every rank always has.
        fewest = sum(sorted(block.samples for block in self._blocks)[: len(self._blocks) // world])
        return fewest // size

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration draws."""
        self.begin_at(epoch, 0)

    def begin_at(self, epoch: int, batch: int) -> None:
        """Let the next iteration begin with batch number ``batch`` of ``epoch``, as a resume does."""
        self._next_epoch, self._next_batch = epoch, batch

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self._next_epoch, self._next_batch
        self.begin_at(epoch + 1, 0)
        drawn = self._resident_batches(epoch) if self.tier != "none" else self._streamed(epoch)
        for pieces in itertools.islice(drawn, first, None):
            batch = _join([self._cut(group, picks) for group, picks in pieces])
            if self._augment is not None:
                numbers = torch.cat([group.numbers_of(picks) for group, picks in pieces]).to(self.device)
                batch = self._augment(batch, self.order.seed, epoch, numbers)
            yield batch

    def fill(self, *, shown: bool | None = None) -> None:
        """Read every row into memory now; the first iteration does it otherwise. Nothing to do above memory."""
        if self.tier == "none" or self._resident is not None:
            return
        where = self.device if self.tier == "vram" else torch.device("cpu")
        columns = [
            torch.empty((self.source.total_rows, *column.shape), dtype=column.dtype, device=where)
            for column in self.source.columns
        ]
        reader = BlockReader(self.source, self._blocks)
        with _pool(reader, self.workers, self.device) as pool:
            batches = (torch.tensor([number]) for number in range(len(self._blocks)))
            for slot in progress(pool.stream(batches, 0), len(self._blocks), "Reading HDF5", shown=shown):
                _raise_first(slot.failures)
                block = self._blocks[int(slot.indices[0])]
                for column, (_, part) in zip(columns, reader.parts(block, slot.rows[0]), strict=True):
                    column[block.global_row : block.global_row + block.rows].copy_(part)
                pool.release(slot)
        none = torch.empty(0, dtype=torch.int64, device=where)
        self._resident = _Group(columns, self.source.first_rows().to(where), none)

    def close(self) -> None:
        """Give all memory back."""
        self._resident = None
        self._thread.shutdown()

    def __enter__(self) -> Hdf5Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ----------------------------------------------------------------- resident

    def _resident_batches(self, epoch: int) -> Iterator[list[tuple[_Group, torch.Tensor]]]:
        self.fill()
        group = self._resident
        assert group is not None
        indices = self._indices(epoch)
        if self.order.drop_last:
            indices = indices[: len(indices) // self.order.batch_size * self.order.batch_size]
        for picks in torch.split(indices.to(group.first_rows.device), self.order.batch_size):
            yield [(group, picks)]

    def _indices(self, epoch: int) -> torch.Tensor:
        """This epoch's order. The next one is drawn meanwhile: for millions of samples that takes seconds."""
        if self._upcoming is not None and self._upcoming[0] == epoch:
            indices = self._upcoming[1].result()
        else:
            indices = self.order.epoch_indices(epoch)
        self._upcoming = (epoch + 1, self._thread.submit(self.order.epoch_indices, epoch + 1))
        return indices

    def _cut(self, group: _Group, picks: torch.Tensor) -> list[torch.Tensor]:
        rows = group.first_rows[picks]
        length = self.source.window
        parts = []
        for column, data in zip(self.source.columns, group.columns, strict=True):
            if length is None:
                parts.append(data.index_select(0, rows))
            elif column.key in self._windowed:
                every = rows[:, None] + torch.arange(length, device=rows.device)
                parts.append(data.index_select(0, every.flatten()).view(len(rows), length, *column.shape))
            else:
                parts.append(data.index_select(0, rows + (length - 1)))
        return [part.to(self.device) for part in parts]

    # ----------------------------------------------------------------- above memory

    def _streamed(self, epoch: int) -> Iterator[list[tuple[_Group, torch.Tensor]]]:
        generator = torch.Generator().manual_seed(self.order.seed + epoch)
        count = len(self._blocks)
        order = torch.randperm(count, generator=generator) if self.order.shuffle else torch.arange(count)
        mine = order[self.order.rank :: self.order.world_size].tolist()
        groups = [mine[start : start + self._blocks_per_group] for start in range(0, len(mine), self._blocks_per_group)]
        size, left = self.order.batch_size, len(self)
        pieces: list[tuple[_Group, torch.Tensor]] = []
        stream = self._groups(groups)
        try:
            for group in stream:
                total = len(group.numbers)
                mixed = torch.randperm(total, generator=generator) if self.order.shuffle else torch.arange(total)
                mixed = mixed.to(self.device)
                while len(mixed):
                    # A batch that one group cannot fill is completed from the next: no sample is left out.
                    missing = size - sum(len(picks) for _, picks in pieces)
                    pieces.append((group, mixed[:missing]))
                    mixed = mixed[missing:]
                    if sum(len(picks) for _, picks in pieces) == size and left:
                        left -= 1
                        yield pieces
                        pieces = []
                    if not left:
                        return
            if pieces and left:
                yield pieces
        finally:
            stream.close()

    def _groups(self, groups: list[list[int]]) -> Generator[_Group, None, None]:
        """Groups on the device; one is read ahead by a thread while the one before it is used."""
        reader = BlockReader(self.source, self._blocks)
        ready: queue.Queue[_Group | BaseException | None] = queue.Queue(maxsize=1)
        stopped = threading.Event()
        pool = _pool(reader, self.workers, self.device)
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

    def _read_group(self, reader: BlockReader, pool: WorkerPool, group: list[int], stream: Any) -> _Group:
        blocks = [self._blocks[number] for number in group]
        rows = sum(block.rows for block in blocks)
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            # Fresh memory for each group: two are alive at a time, and the allocator reuses the one before.
            columns = [torch.empty((rows, *c.shape), dtype=c.dtype, device=self.device) for c in self.source.columns]
            offset = 0
            for slot in pool.stream((torch.tensor([number]) for number in group), 0):
                _raise_first(slot.failures)
                block = self._blocks[int(slot.indices[0])]
                for column, (_, part) in zip(columns, reader.parts(block, slot.rows[0]), strict=True):
                    column[offset : offset + block.rows].copy_(part)
                offset += block.rows
                pool.release(slot)
            first, numbers = _samples_of(blocks, self.source.stride)
            # Every copy above has waited for its end: the group is whole, on whatever stream it is used.
            return _Group(columns, first.to(self.device), numbers.to(self.device))


def _join(pieces: list[list[torch.Tensor]]) -> Any:
    parts = pieces[0] if len(pieces) == 1 else [torch.cat(several) for several in zip(*pieces, strict=True)]
    return parts[0] if len(parts) == 1 else tuple(parts)


def _samples_of(blocks: list[Block], stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each sample begins in the rows of ``blocks`` laid end to end, and its number in the whole."""
    first, numbers, before = [], [], 0
    for block in blocks:
        first.append(before + torch.arange(block.samples) * stride)
        numbers.append(block.first_sample + torch.arange(block.samples))
        before += block.rows
    return torch.cat(first), torch.cat(numbers)


def _pool(reader: BlockReader, workers: int, device: torch.device) -> WorkerPool:
    slots = max(2, 2 * workers)
    return WorkerPool(reader, reader.block_bytes, 1, workers=workers, slots=slots, device=device)


def _raise_first(failures: Any) -> None:
    if failures:
        raise DataError(failures[0].message, DAMAGED)
