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


def ranks() -> tuple[int, int]:
    """Rank and world size of a running torch.distributed job; 0 and 1 without one."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
