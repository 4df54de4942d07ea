"""Where samples live once they were decoded: columns on the device, rows in host memory; shared and pinned memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
import weakref
from typing import Any

import torch

from fulltilt.errors import MachineError, UsageError
from fulltilt.feed.sample_layout import Layout


def shared_bytes(size: int) -> torch.Tensor:
    """Zeroed bytes that forked workers see too. Raises MachineError.

    They are anonymous pages, which the size of /dev/shm does not limit (a container often has 64 MB of it).
    """
    try:
        return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]
    except OSError as error:
        raise MachineError(
            f"the system gives no {size} bytes of memory: {error.strerror or error}",
            "Use smaller batches, or allow the job more memory (ulimit -v).",
        ) from error


def pin(memory: torch.Tensor, device: torch.device, owner: object) -> bool:
    """Lock ``memory`` for direct copies to the GPU, as long as ``owner`` lives. False where that is not possible.

    ``owner`` has to hold the memory, and nobody may hold it longer: pages that are unmapped while the driver knows them
    stay in its books, and whatever is mapped at their address next is copied from the old pages.
    Registering in place avoids torch's pinned allocator, which rounds each block up to a power of two. Do it after
    workers that use the memory were forked: pages that the driver knows are not inherited reliably. The memory must
    have its pages to itself (``shared_bytes`` has): the driver refuses a page that it knows already.
    """
    if device.type != "cuda" or memory.numel() == 0:
        return False
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, size = memory.data_ptr(), memory.numel() * memory.element_size()
    with torch.cuda.device(device):
        if int(cudart.cudaHostRegister(address, size, 0)) != 0:
            _forget_error(device)
            warnings.warn(f"could not pin {size} bytes; copies to the GPU will be slower", stacklevel=2)
            return False
    weakref.finalize(owner, _unpin, address, os.getpid())
    return True


def _unpin(address: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child drops its copy of the owner; the memory is its parent's
    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(cudart.cudaHostUnregister(address)) != 0:
            _forget_error(torch.device("cuda"))


def _forget_error(device: torch.device) -> None:
    """CUDA keeps the error of a refused call and hands it to the next kernel that is launched: let that be ours."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


class DeviceStore:
    """One tensor [samples, *shape] for each leaf on the device; a batch is one gather for each leaf.

    Bytes are moved as integers, because torch indexes those on every device; many other types (uint16) it does not.
    """

    def __init__(self, layout: Layout, samples: int, device: torch.device) -> None:
        self.layout = layout
        self.present = torch.zeros(samples, dtype=torch.bool)
        columns = (torch.empty((samples, *leaf.shape), dtype=leaf.dtype, device=device) for leaf in layout.leaves)
        self._words = [_as_words(column, leaf.nbytes) for column, leaf in zip(columns, layout.leaves, strict=True)]

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

    def row(self, index: int) -> torch.Tensor:
        """One kept sample as a packed row, on the host."""
        row = torch.zeros(self.layout.row_bytes, dtype=torch.uint8)
        for words, leaf in zip(self._words, self.layout.leaves, strict=True):
            if leaf.nbytes:
                row[leaf.offset : leaf.offset + leaf.nbytes] = words[index].cpu().view(torch.uint8)
        return row

    def close(self) -> None:
        """Give the memory back."""
        self._words = []


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

    def row(self, index: int) -> torch.Tensor:
        """One kept sample."""
        return self.rows[index]

    def close(self) -> None:
        """Give the memory back."""
        self.rows = self.rows[:0]


def _as_words(column: torch.Tensor, per_sample: int) -> torch.Tensor:
    """``column`` as [samples, words], in the longest words that divide a sample: a thread moves one at a time."""
    if not per_sample:
        return column
    dtype = next(d for d in (torch.int64, torch.int32, torch.int16, torch.uint8) if per_sample % d.itemsize == 0)
    return column.view(len(column), -1).view(dtype)


def device_or_default(device: torch.device | str | None) -> torch.device:
    """``device`` with its index; without one, the current GPU or else the CPU. Raises UsageError."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is unknown", "Use 'cpu', 'cuda' or 'cuda:0'.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {str(chosen)!r}: torch sees no GPU here", "Leave device out, or use device='cpu'.")
    if chosen.type == "cuda" and str(chosen) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return chosen
