"""``feed.hdf5``: batches from HDF5 files, kept in memory where they fit, else streamed in blocks.

Kept: every row is read once before the first batch, in blocks of whole chunks, into device or host memory. Samples are
gathered by their numbers; overlapping windows share rows.
Streamed: blocks are read in random order, a group of them is shuffled while the next group is read.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import DataError, UsageError
from fulltilt.feed.augment import Augmentation, as_augmentation
from fulltilt.feed.device_prefetch import ahead, copy_stream, enter_thread
from fulltilt.feed.epoch_order import Order, PositionedLoader, ranks
from fulltilt.feed.hdf5_files import DAMAGED, BlockReader, describe
from fulltilt.feed.progress import progress
from fulltilt.feed.random_numbers import mix
from fulltilt.feed.sample_store import device_or_default
from fulltilt.feed.tiers import Residency, choose_tier, measure_free_bytes
from fulltilt.feed.worker_pool import WorkerPool, asked_workers

# Bytes of streamed rows that are shuffled together, unless ``mixing_rows`` is given.
MIXING_BYTES = 1024**3
# So much is gathered at once on a GPU, in whole batches: each gather costs the host a launch.
AT_ONCE_BYTES = 256 * 1024**2
# Compiled models copy tensors at other addresses.
ALIGNMENT_BYTES = 16

# Rows of each key, the first row of each sample in them, and the samples' numbers; in order.
Samples = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]
# The number of a block, and which of its samples: from and to.
BlockPart = tuple[int, int, int]
# A tensor for each key, and the samples' numbers.
Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]


class Hdf5Loader(PositionedLoader):
    """A loader whose batches are tuples of the ``keys``' tensors (one tensor for one key), on the device.

    On a GPU they are views of larger tensors: clone a batch to keep or save it.

    ``window``: a sample is that many rows; samples begin ``stride`` rows apart. Keys not in ``window_keys`` (default:
    the first) give the value at the window's last row. ``part``: the share of each file's rows, from and to.
    ``mixing_rows``: streamed rows that are shuffled together. Raises UsageError, DataError, DoesNotFit.
    ``tier`` is where the rows are kept, ``mixing`` the number of samples that are shuffled together.
    """

    def __init__(
        self,
        files: Sequence[str | Path] | str | Path,
        keys: Sequence[str] | str,
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
    ) -> None:
        super().__init__()
        keys = [keys] if isinstance(keys, str) else list(keys)
        self.source = source = describe(files, keys, window, stride, part)
        rank, world_size = ranks(rank, world_size)
        self.order = Order(source.samples, batch_size, shuffle, seed, drop_last, rank, world_size)
        self.device = device = device_or_default(device)
        self.workers = asked_workers(num_workers)
        self._windowed = set(keys[:1] if window_keys is None else window_keys)
        if unknown := self._windowed - set(keys):
            raise UsageError(f"window_keys names {', '.join(sorted(unknown))}, which is not among the keys")
        self._augment = as_augmentation(augment)
        self._blocks = source.blocks()
        self._reader = BlockReader(source, self._blocks)
        # The rows are on a disk already: residency "disk" streams them from there.
        free_bytes = measure_free_bytes(device, None, reserve_bytes=reserve_bytes)
        asked = "none" if residency == "disk" else residency
        tier = choose_tier(sum(block.rows for block in self._blocks) * source.row_bytes, free_bytes, asked).tier
        self.tier = "ram" if tier == "pinned" else tier  # gathered rows are pinned anyway
        self._where = device if self.tier in ("vram", "none") else torch.device("cpu")
        largest = sorted((block.samples for block in self._blocks), reverse=True)
        per_group = (mixing_rows or MIXING_BYTES // source.row_bytes) // max(block.rows for block in self._blocks)
        self._per_group = max(1, min(len(self._blocks), per_group))
        self.mixing = sum(largest[: self._per_group]) if self.tier == "none" else source.samples
        self._kept: tuple[list[torch.Tensor], torch.Tensor] | None = None
        self._idle: list[WorkerPool] = []
        self._upcoming: tuple[int, Future[torch.Tensor]] | None = None
        self._drawing = ThreadPoolExecutor(1, "fulltilt-order", enter_thread, (self._where,))
        self._stream = copy_stream(device) if self.tier != "vram" else None

    def __len__(self) -> int:
        if self.tier != "none":
            return self.order.batches_per_epoch()
        share, size = self.source.samples // self.order.world_size, self.order.batch_size
        return share // size if self.order.drop_last else -(-share // size)

    def _pass(self) -> Iterator[Any]:
        epoch, first = self._begin()
        self.fill()
        batches = self._batches(self._streamed(epoch, first) if self.tier == "none" else self._resident(epoch, first))
        if self._where != self.device:
            batches = ahead(batches, self.device, self._stream)
        with contextlib.closing(batches):
            for parts, numbers in batches:
                batch: Any = parts[0] if len(parts) == 1 else tuple(parts)
                yield batch if self._augment is None else self._augment(batch, self.order.seed, epoch, numbers)

    @torch.inference_mode(False)  # rows filled in an evaluation are used outside of it
    def fill(self) -> None:
        """Read every row into its tier now, instead of before the first batch; nothing for streamed rows."""
        if self.tier == "none" or self._kept is not None:
            return
        everything = [(number, 0, block.samples) for number, block in enumerate(self._blocks)]
        with contextlib.closing(self._pool()) as pool, contextlib.closing(self._read(pool, everything)) as arriving:
            shown = progress(arriving, len(everything), f"Reading HDF5 into {self.tier}")
            columns, starts, _ = self._loaded(shown, everything)
        self._kept = columns, starts.to(self._where)

    def close(self) -> None:
        """Free all memory and end the workers."""
        self._kept = self._upcoming = None
        while self._idle:
            self._idle.pop().close()

    # ----------------------------------------------------------------- kept rows

    def _resident(self, epoch: int, first: int) -> Generator[Samples, None, None]:
        assert self._kept is not None
        columns, starts = self._kept
        indices = self._drawn(epoch)[first * self.order.batch_size :]
        yield columns, starts[indices], indices

    def _drawn(self, epoch: int) -> torch.Tensor:
        """This rank's samples of ``epoch``; a thread draws the next epoch, which takes seconds for millions."""
        begun, upcoming = self._upcoming or (None, None)
        indices = upcoming.result() if upcoming and begun == epoch else _draw(self.order, epoch, self._where)
        # Not a method, which would hold this loader.
        self._upcoming = epoch + 1, self._drawing.submit(_draw, self.order, epoch + 1, self._where)
        return indices.to(self._where, non_blocking=True)

    # ----------------------------------------------------------------- streamed rows

    def _streamed(self, epoch: int, first: int) -> Generator[Samples, None, None]:
        # Forked here, on the caller's thread, and kept for the next pass. A second iterator gets workers of its own.
        pool = self._idle.pop() if self._idle else self._pool()
        yield from ahead(self._groups(pool, epoch, first), self.device, self._stream)
        self._idle.append(pool)

    def _groups(self, pool: WorkerPool, epoch: int, first: int) -> Generator[Samples, None, None]:
        """This rank's blocks in groups, with the samples of each group shuffled, from batch number ``first`` on."""
        seed, used, groups = mix(self.order.seed, epoch), first * self.order.batch_size, []
        mine = self._share(seed)
        for start in range(0, len(mine), self._per_group):
            group = mine[start : start + self._per_group]
            count = sum(end - begin for _, begin, end in group)
            if used < count:
                groups.append((group, mix(seed, start), used))
            used = max(0, used - count)
        with contextlib.closing(self._read(pool, [part for group, _, _ in groups for part in group])) as arriving:
            for group, group_seed, used in groups:
                columns, starts, numbers = self._loaded(itertools.islice(arriving, len(group)), group)
                order = self._mixed(len(numbers), group_seed)[used:]
                yield columns, starts[order].to(self.device), numbers[order].to(self.device)

    def _share(self, seed: int) -> list[BlockPart]:
        """This rank's blocks, and which of their samples; every rank has equally many samples."""
        share = self.source.samples // self.order.world_size
        low, mine, before = self.order.rank * share, [], 0
        for number in self._mixed(len(self._blocks), seed).tolist():
            samples = self._blocks[number].samples
            begin, end = max(0, low - before), min(samples, low + share - before)
            if begin < end:
                mine.append((number, begin, end))
            before += samples
        return mine

    def _mixed(self, count: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(count, generator=generator) if self.order.shuffle else torch.arange(count)

    # ----------------------------------------------------------------- reading

    def _pool(self) -> WorkerPool:
        """Processes that read whole blocks, with more slots than processes, so that none waits for a copy."""
        slots = max(2, 2 * self.workers)
        return WorkerPool(
            self._reader, self._reader.block_bytes, 1, workers=self.workers, slots=slots, device=self.device
        )

    def _read(self, pool: WorkerPool, parts: list[BlockPart]) -> Generator[torch.Tensor, None, None]:
        """Each block's bytes, which are valid until the next are asked for. Raises DataError."""
        with contextlib.closing(pool.stream((torch.tensor([number]) for number, _, _ in parts), 0)) as stream:
            for rows, failures in stream:
                if failures:
                    raise DataError(failures[0].message, DAMAGED)
                try:
                    yield rows[0]
                finally:
                    if self.device.type == "cuda":
                        torch.cuda.current_stream(self.device).synchronize()

    def _loaded(self, arriving: Iterable[torch.Tensor], group: list[BlockPart]) -> Samples:
        """The rows of all blocks of ``group``, and the samples that are asked for."""
        rows = sum(self._blocks[number].rows for number, _, _ in group)
        described = self.source.columns
        columns = [torch.empty((rows, *one.shape), dtype=one.dtype, device=self._where) for one in described]
        starts, numbers, offset = [], [], 0
        for (number, begin, end), data in zip(group, arriving, strict=True):
            block, inside = self._blocks[number], torch.arange(begin, end)
            for column, part in zip(columns, self._reader.parts(block, data), strict=True):
                column[offset : offset + block.rows].copy_(part, non_blocking=True)
            starts.append(offset + inside * self.source.stride)
            numbers.append(block.first_sample + inside)
            offset += block.rows
        return columns, torch.cat(starts), torch.cat(numbers)

    # ----------------------------------------------------------------- batches

    def _batches(self, groups: Generator[Samples, None, None]) -> Generator[Batch, None, None]:
        """Batches on the device and the numbers of their samples. A batch may span two groups."""
        size, pieces = self.order.batch_size, list[Batch]()
        with contextlib.closing(groups):
            for columns, starts, numbers in groups:
                missing = -sum(len(piece[1]) for piece in pieces) % size
                head = self._cut(columns, starts[:missing], numbers[:missing])
                for batch in itertools.chain(head, self._cut(columns, starts[missing:], numbers[missing:])):
                    pieces.append(batch)
                    if sum(len(piece[1]) for piece in pieces) == size:
                        yield _joined(pieces)
                        pieces = []
        if pieces and not self.order.drop_last:
            yield _joined(pieces)

    def _cut(self, columns: list[torch.Tensor], starts: torch.Tensor, numbers: torch.Tensor) -> Iterator[Batch]:
        """Batches of the samples that begin at ``starts``, on a GPU as views of larger gathers."""
        if not len(starts):
            return iter(())
        size = self.order.batch_size
        keys = [
            self._gathered(_as_samples(column, self.source.window, described.key in self._windowed), starts)
            for column, described in zip(columns, self.source.columns, strict=True)
        ]
        return zip(zip(*keys, strict=True), torch.split(numbers.to(self.device), size), strict=True)

    def _gathered(self, samples: torch.Tensor, starts: torch.Tensor) -> Iterator[torch.Tensor]:
        """The entries ``starts`` of ``samples`` on the device, batch by batch; several batches are gathered at once."""
        size = self.order.batch_size
        batch_bytes = size * samples[:1].numel() * samples.element_size()
        own = self.device.type == "cpu" or batch_bytes % ALIGNMENT_BYTES
        at_once = 1 if own else max(1, AT_ONCE_BYTES // max(1, batch_bytes))
        for several in torch.split(starts, at_once * size):
            picked = samples.index_select(0, several)
            if self._where != self.device:
                picked = picked.pin_memory().to(self.device, non_blocking=True)
            yield from torch.split(picked, size)


def _as_samples(rows: torch.Tensor, window: int | None, whole: bool) -> torch.Tensor:
    """A view of ``rows``: entry r is the window that begins at row r, or if not ``whole`` its last row."""
    if window is None:
        return rows
    if not whole:
        return rows[window - 1 :]
    return rows.as_strided((len(rows) - window + 1, window, *rows.shape[1:]), (rows.stride(0), *rows.stride()))


def _joined(pieces: list[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    parts, numbers = zip(*pieces, strict=True)
    return tuple(torch.cat(several) for several in zip(*parts, strict=True)), torch.cat(numbers)


def _draw(order: Order, epoch: int, device: torch.device) -> torch.Tensor:
    indices = order.epoch_indices(epoch)
    # Pinned: other copies would wait for all launched kernels.
    return indices.pin_memory() if device.type == "cuda" else indices


hdf5 = Hdf5Loader
