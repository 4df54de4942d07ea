"""Stores of decoded samples: packed rows on the device or in host memory; shared and pinned memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import warnings
import weakref
from typing import Any

import torch

from fulltilt.errors import MachineError, UsageError


def shared_bytes(size: int) -> torch.Tensor:
    """Zeroed bytes that forked workers see too. Raises MachineError.

    Anonymous pages are not limited by /dev/shm, of which a container often has only 64 MB.
    """
    try:
        return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]
    except OSError as error:
        raise MachineError(
            f"cannot allocate {size} bytes of memory: {error.strerror or error}",
            "Use smaller batches, or allow the job more memory (ulimit -v).",
        ) from error


def memory_of(row: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without NumPy; the caller keeps the tensor alive."""
    size = row.numel() * row.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(row.data_ptr())).cast("B")


def pin(memory: torch.Tensor, device: torch.device, owner: object) -> None:
    """Pin ``memory`` in place, if possible, as long as ``owner`` lives.

    ``owner`` has to hold the memory, and nobody longer: after pages are unmapped while registered, copies from whatever
    is mapped at their address read the old pages. torch's pinned allocator would round up to a power of two. Fork
    workers that use the memory first: registered pages are not inherited reliably. The memory must have pages of its
    own (as from ``shared_bytes``), because a page cannot be registered twice.
    """
    if device.type != "cuda" or memory.numel() == 0:
        return
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, size = memory.data_ptr(), memory.numel() * memory.element_size()
    with torch.cuda.device(device):
        if int(cudart.cudaHostRegister(address, size, 0)) != 0:
            _forget_error(device)
            warnings.warn(f"could not pin {size} bytes; copies to the GPU will be slower", stacklevel=2)
            return
    weakref.finalize(owner, _unpin, address, os.getpid())


def _unpin(address: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # in a forked child: the memory is the parent's
    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(cudart.cudaHostUnregister(address)) != 0:
            _forget_error(torch.device("cuda"))


def _forget_error(device: torch.device) -> None:
    """CUDA reports the error of a failed call at the next launch: launch a kernel to clear it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


class Store:
    """Packed rows [samples, row_bytes]: on the device, or in host memory (private, shared, pinned, a mapped file).

    Rows are moved as int64: torch moves element by element where it cannot use memcpy.
    """

    def __init__(self, rows: torch.Tensor, present: torch.Tensor, *, on_device: bool = False) -> None:
        self.rows = rows
        self.present = present
        self.on_device = on_device

    def has(self, indices: torch.Tensor) -> torch.Tensor:
        """Which of ``indices`` (on the host) are kept."""
        return self.present[indices]

    def write(self, indices: torch.Tensor, rows: torch.Tensor, places: torch.Tensor | None = None) -> None:
        """Keep packed ``rows`` as samples ``indices``; ``places`` are the same on the device, for a device store."""
        places = indices if places is None else places
        self.rows.view(torch.int64).index_copy_(0, places, rows.view(torch.int64))
        self.present[indices] = True

    def gather(self, indices: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The rows of a batch, new or in ``out``."""
        words = None if out is None else out.view(torch.int64)
        return torch.index_select(self.rows.view(torch.int64), 0, indices, out=words).view(torch.uint8)

    def row(self, index: int) -> torch.Tensor:
        """One kept sample, on the host."""
        return self.rows[index].cpu()

    def close(self) -> None:
        """Free the memory."""
        self.rows = self.rows[:0]


def device_or_default(device: torch.device | str | None) -> torch.device:
    """``device`` with its index; without one, the current GPU or else the CPU. Raises UsageError."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"device {device!r} is unknown", "Use 'cpu', 'cuda' or 'cuda:0'.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {str(chosen)!r}: torch sees no GPU here", "Leave device out, or use device='cpu'.")
    if chosen.type == "cuda" and str(chosen) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return chosen
