"""Where samples live once they were decoded: columns on the device, or rows in host memory or in a mapped file."""

from __future__ import annotations

import torch

from fulltilt.feed.structure import Layout


class DeviceStore:
    """One tensor [samples, *shape] for each leaf on the device; a batch is one gather for each leaf."""

    def __init__(self, layout: Layout, samples: int, device: torch.device) -> None:
        self.layout = layout
        self.present = torch.zeros(samples, dtype=torch.bool)
        self.columns = [torch.empty((samples, *leaf.shape), dtype=leaf.dtype, device=device) for leaf in layout.leaves]
        self._words = [_as_words(column) for column in self.columns]

    def has(self, indices: torch.Tensor) -> torch.Tensor:
        """Which of ``indices`` (on the host) can be served from here."""
        return self.present[indices]

    def write(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep packed ``rows`` as samples ``indices``, both on the device. The caller marks them as present."""
        for column, leaf in zip(self.columns, self.layout.split(rows), strict=True):
            column.index_copy_(0, indices, leaf)

    def gather(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """The leaves of the batch ``indices`` (on the device): fresh tensors that belong to the caller."""
        batch = []
        for column, words in zip(self.columns, self._words, strict=True):
            picked = words.index_select(0, indices)
            batch.append(picked if words is column else picked.view(column.dtype).view(-1, *column.shape[1:]))
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


def _as_words(column: torch.Tensor) -> torch.Tensor:
    """``column`` as [samples, words of 8 bytes] where that divides: a byte-wise gather moves an eighth per thread."""
    per_sample = column[0].numel() * column.element_size() if len(column) else 0
    if column.element_size() == 8 or per_sample == 0 or per_sample % 8:
        return column
    return column.view(len(column), -1).view(torch.int64)
