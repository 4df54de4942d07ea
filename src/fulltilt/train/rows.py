"""Rows of tensors from all ranks, in the order of the ranks; ranks may have different numbers of them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def counts_of_all(count: int) -> list[int]:
    """Every rank's ``count``. Host to host; the GPUs run on."""
    mine = torch.tensor([count])
    counts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, mine)
    return [int(each) for each in counts]


def rows_of_all(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The rows of all ranks, ``counts`` of them each. Gradients flow to our own rows only."""
    most, rank = max(counts), dist.get_rank()
    padded = rows.detach().new_zeros(most, *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    parts = [part[:count] for part, count in zip(gathered, counts, strict=True)]
    parts[rank] = rows
    return torch.cat(parts)
