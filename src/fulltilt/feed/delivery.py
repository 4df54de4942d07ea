"""Batches as tensors on the device: gathered there, or copied ahead through a ring of buffers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fulltilt.feed.prefetch import DeviceRing, HostBatch
from fulltilt.feed.repeats import sample_of
from fulltilt.feed.stores import DeviceStore
from fulltilt.feed.structure import Layout
from fulltilt.feed.supply import Supply

Leaves = tuple[list[torch.Tensor], torch.Tensor]  # the leaves of a batch, and the numbers of its draws on the device


class Delivery:
    """Takes batches of sample numbers to the device, in order. The tensors belong to the caller."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._ring: DeviceRing | None = None
        self.copies_ahead = device.type == "cuda"  # on a CPU there is nothing to copy to

    def batches(self, supply: Supply, batches: list[torch.Tensor], epoch: int) -> Iterator[Leaves]:
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

    def _from_source(self, supply: Supply, batches: list[torch.Tensor], epoch: int) -> Iterator[Leaves]:
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

    def _here(self, supply: Supply, batches: list[torch.Tensor], epoch: int) -> Iterator[Leaves]:
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

    def _copied(self, supply: Supply, batches: list[torch.Tensor], epoch: int) -> Iterator[Leaves]:
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
