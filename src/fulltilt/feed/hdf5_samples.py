"""Samples cut out of rows that lie in memory: one gather for each key, and for labels and the like one for an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from fulltilt.feed.hdf5_blocks import Column, Source

# What a key's samples of a whole epoch may take to be gathered at once: each gather costs the host a launch.
AT_ONCE_BYTES = 64 * 1024**2


class Cutter:
    """Cuts the samples of ``source`` out of its rows. Keys in ``windowed`` give every row of a window, others the last.

    ``starts`` are the rows with which samples begin.
    """

    def __init__(self, source: Source, windowed: tuple[str, ...], device: torch.device) -> None:
        self._source, self._windowed, self._device = source, windowed, device

    def cut(self, rows: Sequence[torch.Tensor], starts: torch.Tensor) -> list[torch.Tensor]:
        """The samples on the device, a tensor for each key."""
        return [
            self._gathered(self._seen_as_samples(column, data), starts)
            for column, data in zip(self._source.columns, rows, strict=True)
        ]

    def batches(self, rows: Sequence[torch.Tensor], starts: torch.Tensor, size: int) -> Iterator[list[torch.Tensor]]:
        """The same, ``size`` samples at a time."""
        columns = zip(self._source.columns, rows, strict=True)
        keys = [self._batches_of(self._seen_as_samples(column, data), starts, size) for column, data in columns]
        return map(list, zip(*keys, strict=True))

    def _batches_of(self, samples: torch.Tensor, starts: torch.Tensor, size: int) -> Iterable[torch.Tensor]:
        if samples[:1].numel() * samples.element_size() * len(starts) <= AT_ONCE_BYTES:
            return torch.split(self._gathered(samples, starts), size)
        return (self._gathered(samples, some) for some in torch.split(starts, size))

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
