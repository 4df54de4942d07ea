"""Where a loader runs: its device and its rank, unless the user names them."""

from __future__ import annotations

from typing import Any

import torch

from fulltilt.errors import UsageError


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


def home_of(dataset: Any, device: torch.device) -> torch.device:
    """Where samples are kept for ``device``: in host memory if the data set finishes whole batches on it by itself."""
    return torch.device("cpu") if getattr(dataset, "finishes_on_device", False) else device


def ranks(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Rank and world size as given, else those of a running torch.distributed job; 0 and 1 without one.

    Raises UsageError for anything but a whole number below another.
    """
    distributed = torch.distributed
    running = distributed.is_available() and distributed.is_initialized()
    found = (distributed.get_rank(), distributed.get_world_size()) if running else (0, 1)
    rank, world_size = found[0] if rank is None else rank, found[1] if world_size is None else world_size
    if not isinstance(rank, int) or not isinstance(world_size, int):
        raise UsageError(f"rank {rank!r} and world_size {world_size!r} must be whole numbers")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not below world_size {world_size}")
    return rank, world_size
