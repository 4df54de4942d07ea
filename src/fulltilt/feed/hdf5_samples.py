"""Samples cut out of rows that lie in memory, by a gather for each key."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from fulltilt.feed.hdf5_blocks import Column, Source

# Several batches are gathered at once, as long as they take no more than this, or no more than this share of a GPU's
# memory: each gather costs the host a launch.
AT_ONCE_BYTES = 128 * 1024**2
AT_ONCE_SHARE = 1 / 512
# Compiled models copy what lies elsewhere.
ALIGNMENT_BYTES = 16


class Cutter:
    """Cuts the samples of ``source`` out of its rows. Keys in ``windowed`` give every row of a window, others the last.

    ``starts`` are the rows with which samples begin.
    """

    def __init__(self, source: Source, windowed: tuple[str, ...], device: torch.device) -> None:
        self._source, self._windowed, self._device = source, windowed, device
        self._at_once_bytes = AT_ONCE_BYTES
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            self._at_once_bytes = max(AT_ONCE_BYTES, int(memory * AT_ONCE_SHARE))

    def cut(self, rows: Sequence[torch.Tensor], starts: torch.Tensor) -> list[torch.Tensor]:
        """The samples on the device, a tensor for each key."""
        return [
            self._gathered(self._seen_as_samples(column, data), starts)
            for column, data in zip(self._source.columns, rows, strict=True)
        ]

    def batches(
        self, rows: Sequence[torch.Tensor], starts: torch.Tensor, size: int
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """The same, ``size`` samples at a time: for each of them the host only takes a view."""
        columns = zip(self._source.columns, rows, strict=True)
        keys = [self._batches_of(self._seen_as_samples(column, data), starts, size) for column, data in columns]
        return zip(*keys, strict=True)

    def _batches_of(self, samples: torch.Tensor, starts: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
        batch_bytes = size * samples[:1].numel() * samples.element_size()
        at_once = 1 if batch_bytes % ALIGNMENT_BYTES else max(1, self._at_once_bytes // max(1, batch_bytes))
        groups = (
            torch.split(self._gathered(samples, several), size) for several in torch.split(starts, at_once * size)
        )
        return itertools.chain.from_iterable(groups)

    def _gathered(self, samples: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return samples.index_select(0, starts).to(self._device)

    def _seen_as_samples(self, column: Column, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` so that the sample that begins with row r is entry r; nothing is copied."""
        length = self._source.window
        if length is None:
            return rows
        if column.key not in self._windowed:
            return rows[length - 1 :]
        shape = (max(0, len(rows) - length + 1), length, *rows.shape[1:])
        return rows.as_strided(shape, (rows.stride(0), *rows.stride()))
