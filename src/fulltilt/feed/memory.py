"""Memory that several processes share, and memory that the GPU copies from without the CPU's help."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import warnings
import weakref
from typing import Any

import torch

from fulltilt.errors import MachineError


def start_method() -> str:
    """How worker processes are started here: fork where the platform has it, as torch's DataLoader does."""
    return "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"


def shared_bytes(size: int) -> torch.Tensor:
    """Zeroed bytes that forked and spawned workers see too.

    With fork they are anonymous pages, which the size of /dev/shm does not limit (a container often has 64 MB of it).
    Raises MachineError.
    """
    if start_method() == "fork":
        try:
            return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]
        except OSError as error:
            raise MachineError(
                f"the system gives no {size} bytes of memory: {error.strerror or error}",
                "Use smaller batches, or allow the job more memory (ulimit -v).",
            ) from error
    memory: torch.Tensor = torch.zeros(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    return memory


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
