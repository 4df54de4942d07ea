"""Where samples live once they were decoded: columns on the device, or rows in host memory or in a mapped file."""

from __future__ import annotations

import torch

from fulltilt.feed.structure import Layout


class DeviceStore:
    """One tensor [samples, *shape] for each leaf on the device; a batch is one gather for each leaf.

    Bytes are moved as integers, because torch indexes those on every device; many other types (uint16) it does not.
    """

    def __init__(self, layout: Layout, samples: int, device: torch.device) -> None:
        self.layout = layout
        self.present = torch.zeros(samples, dtype=torch.bool)
        self.columns = [torch.empty((samples, *leaf.shape), dtype=leaf.dtype, device=device) for leaf in layout.leaves]
        self._words = [_as_words(column, leaf.nbytes) for column, leaf in zip(self.columns, layout.leaves, strict=True)]

    def has(self, indices: torch.Tensor) -> torch.Tensor:
        """Which of ``indices`` (on the host) can be served from here."""
        return self.present[indices]

    def write(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep packed ``rows`` as samples ``indices``, both on the device. The caller marks them as present."""
        for words, leaf in zip(self._words, self.layout.leaves, strict=True):
            if leaf.nbytes:
                part = rows[:, leaf.offset : leaf.offset + leaf.nbytes]
                words.index_copy_(0, indices, part.view(words.dtype))

    def gather(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """The leaves of the batch ``indices`` (on the device): fresh tensors that belong to the caller."""
        batch = []
        for words, leaf in zip(self._words, self.layout.leaves, strict=True):
            picked = words.index_select(0, indices)
            if leaf.nbytes:
                picked = picked.view(leaf.dtype).view(len(indices), *leaf.shape)
            batch.append(picked)
        return batch

    def close(self) -> None:
        """Give the memory back."""
        self.columns, self._words = [], []


class HostStore:
    """Packed rows [samples, row_bytes] in host memory: private, shared with workers, pinned, or a mapped file."""

    def __init__(self, rows: torch.Tensor, present: torch.Tensor) -> None:
        self.rows = rows
        self.present = present
        self.pinned = False

    def has(self, indices: torch.Tensor) -> torch.Tensor:
        """Which of ``indices`` can be served from here."""
        return self.present[indices]

    def write(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep packed ``rows`` as samples ``indices``; they count as present when all bytes are there."""
        self.rows.index_copy_(0, indices, rows)
        self.present[indices] = True

    def gather(self, indices: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Assemble a batch in ``out`` [batch, row_bytes], with all of torch's threads and without the GIL."""
        # Eight bytes at a time: index_select copies element by element where it cannot use memcpy.
        torch.index_select(self.rows.view(torch.int64), 0, indices, out=out.view(torch.int64))
        return out

    def close(self) -> None:
        """Give the memory back."""
        self.rows = self.rows[:0]


def _as_words(column: torch.Tensor, per_sample: int) -> torch.Tensor:
    """``column`` as [samples, words], in the longest words that divide a sample: a thread moves one at a time."""
    if not per_sample:
        return column
    dtype = next(d for d in (torch.int64, torch.int32, torch.int16, torch.uint8) if per_sample % d.itemsize == 0)
    return column.view(len(column), -1).view(dtype)
