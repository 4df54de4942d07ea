"""The exact Euclidean distance to the object for every pixel, for a whole batch on its device."""

from __future__ import annotations

import torch

# Bytes that the comparison of every row with every other may take at a time.
WORKING_BYTES = 256 * 2**20


def nearest_inside(inside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For [batch, height, width]: the distance to the nearest pixel that is inside, and that pixel's flat index.

    First the nearest in each row; then, for each column, the best of those over all rows: every row is compared with
    every other, which suits a GPU better than anything cleverer. Where nothing is inside, the distance means nothing.
    """
    column, gap = _nearest_in_row(inside)
    height, width = inside.shape[1:]
    rows = torch.arange(height, device=inside.device)
    squared_rows = ((rows[:, None] - rows[None, :]) ** 2).float()
    squared_gap = gap * gap
    distance = torch.empty_like(squared_gap)
    place = torch.empty_like(column)
    step = max(WORKING_BYTES // (4 * max(height * height * width, 1)), 1)
    for first in range(0, len(inside), step):
        part = slice(first, first + step)
        # [batch, from row, via row, column]
        best = (squared_rows[None, :, :, None] + squared_gap[part, None]).min(dim=2)
        distance[part] = torch.sqrt(best.values)
        place[part] = best.indices * width + column[part].gather(1, best.indices)
    return distance, place


def _nearest_in_row(inside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of the nearest inside pixel of the same row, and how far it is; far beyond the picture without one."""
    width = inside.shape[-1]
    far = 4 * max(inside.shape[1:])
    columns = torch.arange(width, device=inside.device).expand_as(inside)
    before = torch.where(inside, columns, -far).cummax(dim=2).values
    behind = torch.where(inside, columns, far + width).flip(2).cummin(dim=2).values.flip(2)
    nearer = torch.where(columns - before <= behind - columns, before, behind)
    return nearer.clamp(0, width - 1), (columns - nearer).abs().float()
