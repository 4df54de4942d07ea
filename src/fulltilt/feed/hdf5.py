"""``feed.hdf5``: batches from HDF5 files, resident where they fit, else shuffled within a stated window.

Resident: every row is read once, in large blocks, while the first epoch trains, and lies on the device (or in host
memory) as it is in the file; overlapping windows are cut out by a gather, so that a row is stored once however many
windows share it.
Above memory: blocks are drawn in random order, a group of them is mixed, and the next group is read meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from fulltilt.errors import UsageError
from fulltilt.feed.augment import Augmentation, as_augmentation
from fulltilt.feed.caches import default_cache_dir
from fulltilt.feed.hdf5_arrival import ArrivalOrder, ResidentRows
from fulltilt.feed.hdf5_blocks import Source, describe
from fulltilt.feed.hdf5_samples import Cutter
from fulltilt.feed.hdf5_stream import BlockStream, Rows
from fulltilt.feed.order import Order
from fulltilt.feed.places import device_or_default, ranks
from fulltilt.feed.progress import progress
from fulltilt.feed.standing import position
from fulltilt.feed.tiers import choose_tier, default_workers, measure_room
from fulltilt.feed.upcoming import UpcomingOrder
from fulltilt.onlookers import seen

Residency = Literal["auto", "vram", "ram", "none"]
# Rows that are mixed with each other above memory: a gigabyte of them, unless the user asks for more.
MIXING_BYTES = 1024**3
# Blocks that are mixed in the epoch in which they arrive: enough to shuffle, few enough that training begins at once.
ARRIVAL_BLOCKS = 16
ARRIVAL_SHARE = 1 / 8


def hdf5(
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
) -> Hdf5Loader:
    """A loader whose batches are tuples of the ``keys``' tensors (one tensor for one key), on the device.

    ``window``: a sample is that many rows, ``stride`` apart; keys not in ``window_keys`` (default: the first) give the
    value at the window's last row. ``part``: which share of each file's rows, from and to. ``mixing_rows`` is the
    window of the shuffle above memory (``loader.mixing``). Raises UsageError, DataError.
    """
    keys = [keys] if isinstance(keys, str) else list(keys)
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


class Hdf5Loader:
    """What ``feed.hdf5`` returns. ``tier`` is where rows live; ``mixing`` how many samples a shuffle mixes (or all).

    Rows that are to stay in memory arrive while the first epoch trains: it mixes ``arrival_mixing`` samples at a time.
    """

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
        self._cutter = Cutter(source, windowed, device)
        self._augment = augment
        self._next_epoch = self._next_batch = 0
        self._blocks = source.blocks()
        room = measure_room(device, default_cache_dir(), reserve_bytes=reserve_bytes)
        choice = choose_tier(source.total_rows * source.row_bytes, room, residency)
        self.tier = "none" if choice.tier in ("disk", "none") else "vram" if choice.tier == "vram" else "ram"
        if self.tier == "ram" and device.type == "cuda" and residency == "auto":
            self.tier = "none"  # a gather in host memory is slower than reading blocks ahead
        self._where = device if self.tier == "vram" else torch.device("cpu")
        count = len(self._blocks)
        per_group = mixing_rows or max(1, MIXING_BYTES // source.row_bytes)
        per_group = max(1, min(count, per_group // max(block.rows for block in self._blocks)))
        self._stream = BlockStream(source, self._blocks, per_group, device, workers)
        self._rows: ResidentRows | None = None
        at_once = min(per_group, max(ARRIVAL_BLOCKS, int(count * ARRIVAL_SHARE)))
        self._arrival = ArrivalOrder(self._blocks, at_once, order.seed, shuffle=order.shuffle)
        # Not a method of this loader's: it would keep itself alive, and its threads.
        self._orders = UpcomingOrder(functools.partial(_drawn, order, self._arrival), self._where)
        largest = sorted((block.samples for block in self._blocks), reverse=True)
        self.mixing = source.samples if self.tier != "none" else sum(largest[:per_group])
        self.arrival_mixing = sum(largest[:at_once])

    def __len__(self) -> int:
        if self.tier != "none":
            return self.order.batches_per_epoch()
        return self._stream.batches_per_epoch(self.order)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration draws."""
        self.begin_at(epoch, 0)

    def begin_at(self, epoch: int, batch: int) -> None:
        """Let the next iteration begin with batch number ``batch`` of ``epoch``. Raises UsageError."""
        self._next_epoch, self._next_batch = position(epoch, batch)

    def __iter__(self) -> Iterator[Any]:
        return seen(self, self._pass())

    def _pass(self) -> Iterator[Any]:
        epoch, first = self._next_epoch, self._next_batch
        self.begin_at(epoch + 1, 0)
        for parts, numbers in self._resident(epoch, first) if self.tier != "none" else self._streamed(epoch, first):
            batch: Any = parts[0] if len(parts) == 1 else tuple(parts)
            yield batch if self._augment is None else self._augment(batch, self.order.seed, epoch, numbers)

    def fill(self, *, shown: bool | None = None) -> None:
        """Read every row into memory now, instead of while the first epoch trains. Nothing to do above memory."""
        if self.tier == "none" or (self._rows is not None and self._rows.complete):
            return
        order = [number for group in self._arrival.groups for number in group]
        rows = self._begin(order)
        for number in progress(order, len(order), "Reading HDF5", shown=shown):
            rows.wait_for([number])

    def close(self) -> None:
        """Give all memory back."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None
        self._stream.close()
        self._orders.close()

    def __del__(self) -> None:
        # A loader that was dropped without being closed must not leave a thread that reads ahead.
        with contextlib.suppress(Exception):
            self.close()

    def __enter__(self) -> Hdf5Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ----------------------------------------------------------------- resident

    def _resident(self, epoch: int, first: int) -> Iterator[tuple[Sequence[torch.Tensor], torch.Tensor]]:
        size, world = self.order.batch_size, self.order.world_size
        groups = self._arrival.groups
        arriving = epoch == 0 or not self.order.shuffle
        group = self._arrival.group_at(first * size * world) if arriving else 0
        # A resume begins with the rows it needs; the ones before them come last.
        rows = self._begin(number for part in (*groups[group:], *groups[:group]) for number in part)
        indices = self._orders.of(epoch)
        if self.order.drop_last:
            indices = indices[: len(indices) // size * size]
        indices = indices[first * size :]
        if not arriving:
            rows.wait_for(range(len(self._blocks)))
        if rows.complete:
            cut = self._cutter.batches(rows.columns, rows.first_rows[indices], size)
            yield from zip(cut, torch.split(indices.to(self.device), size), strict=True)
            return
        for number, picks in enumerate(torch.split(indices, size), start=first + 1):
            if not rows.complete:
                last = self._arrival.group_at(min(number * size * world, self.source.samples) - 1)
                rows.wait_for(block for part in groups[group : last + 1] for block in part)
                group = last
            yield self._cut(rows, picks), picks.to(self.device)

    def _begin(self, order: Iterable[int]) -> ResidentRows:
        if self._rows is None:
            self._rows = ResidentRows(self.source, self._blocks, self._where, self.device, self.workers)
        self._rows.begin(order)
        return self._rows

    # ----------------------------------------------------------------- above memory

    def _streamed(self, epoch: int, first: int) -> Iterator[tuple[Sequence[torch.Tensor], torch.Tensor]]:
        for pieces in self._stream.batches(self.order, epoch, first, len(self)):
            cut = [self._cut(rows, picks) for rows, picks in pieces]
            parts = cut[0] if len(cut) == 1 else [torch.cat(several) for several in zip(*cut, strict=True)]
            yield parts, torch.cat([rows.numbers[picks] for rows, picks in pieces])

    def _cut(self, rows: Rows | ResidentRows, picks: torch.Tensor) -> list[torch.Tensor]:
        """The samples ``picks`` on the device, a tensor for each key."""
        return self._cutter.cut(rows.columns, rows.first_rows[picks])


def _drawn(order: Order, arrival: ArrivalOrder, epoch: int) -> torch.Tensor:
    """The numbers of this rank's samples in ``epoch``, in order."""
    return order.share(arrival.indices()) if epoch == 0 else order.epoch_indices(epoch)
