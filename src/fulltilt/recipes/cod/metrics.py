"""The measures of the field, for a whole batch at once and on its device: one value for each picture.

IoU at one half, S-measure (Fan 2017), weighted F-measure (Margolin 2014), mean E-measure (Fan 2018) and MAE. As in the
reference implementation, pysodmetrics, a prediction is stretched to the range 0 to 1 first, except for IoU.
Pictures are measured at the size they are trained at, which is cheap enough for every epoch. Papers measure at the
mask's own size: these figures compare runs of this recipe, not with theirs.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F  # noqa: N812

EPS = torch.finfo(torch.float64).eps
LEVELS = 256


def measure(probability: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of probabilities and masks [batch, 1, height, width]: all measures, each [batch]. Only of mae less is better."""
    raw, inside = probability[:, 0].float(), mask[:, 0] > 0
    exact = stretch(raw)
    stretched = exact.float()
    return {
        "iou": iou(raw, inside),
        "s_measure": s_measure(stretched, inside),
        "weighted_f": weighted_f(stretched, inside),
        "mean_e": mean_e(exact, inside),
        "mae": (stretched - inside.float()).abs().mean(dim=(1, 2)),
    }


def stretch(values: torch.Tensor) -> torch.Tensor:
    """Each picture of [batch, height, width] in 256 levels from 0 to 1, as if saved as an image and loaded again.

    In float64: the E-measure counts levels, and float32 would put some pixels on the level below.
    """
    values = torch.floor(values.double() * (LEVELS - 1)) / (LEVELS - 1)
    low, high = values.amin(dim=(1, 2), keepdim=True), values.amax(dim=(1, 2), keepdim=True)
    return torch.where(high > low, (values - low) / (high - low).clamp(min=EPS), values)


def iou(values: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Intersection over union at a threshold of one half; 1 when both are empty."""
    found = values >= 0.5
    both, either = (found & inside).sum(dim=(1, 2)), (found | inside).sum(dim=(1, 2))
    return torch.where(either > 0, both / either.clamp(min=1), 1.0)


# --------------------------------------------------------------------------- S-measure


def s_measure(values: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Likeness of structure: half by object and background, half by the four quarters about the object's centre."""
    share = inside.float().mean(dim=(1, 2))
    mixed = (0.5 * _by_object(values, inside, share) + 0.5 * _by_quarter(values, inside)).clamp(min=0)
    mean = values.mean(dim=(1, 2))
    return torch.where(share == 0, 1 - mean, torch.where(share == 1, mean, mixed))


def _by_object(values: torch.Tensor, inside: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    return share * _even(values, inside) + (1 - share) * _even(1 - values, ~inside)


def _even(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """How high and even ``values`` are in a region."""
    count = where.sum(dim=(1, 2)).clamp(min=1)
    mean = torch.where(where, values, 0).sum(dim=(1, 2)) / count
    spread = torch.where(where, (values - mean[:, None, None]) ** 2, 0).sum(dim=(1, 2))
    deviation = torch.sqrt(spread / (count - 1).clamp(min=1))
    return 2 * mean / (mean**2 + 1 + deviation + EPS)


def _by_quarter(values: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    height, width = values.shape[1:]
    rows = torch.arange(height, device=values.device, dtype=torch.float64)[None, :, None]
    columns = torch.arange(width, device=values.device, dtype=torch.float64)[None, None, :]
    count = inside.sum(dim=(1, 2)).clamp(min=1)
    below = rows > torch.round((inside * rows).sum(dim=(1, 2)) / count)[:, None, None]
    right = columns > torch.round((inside * columns).sum(dim=(1, 2)) / count)[:, None, None]
    total = torch.zeros(len(values), device=values.device)
    for vertical in (~below, below):
        for horizontal in (~right, right):
            quarter = vertical & horizontal
            total = total + _likeness(values, inside.float(), quarter) * quarter.float().mean(dim=(1, 2))
    return total


def _likeness(values: torch.Tensor, truth: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The structural similarity of two pictures within a region."""
    count = where.sum(dim=(1, 2)).clamp(min=1)

    def mean(of: torch.Tensor) -> torch.Tensor:
        return torch.where(where, of, 0).sum(dim=(1, 2)) / count

    x, y = mean(values), mean(truth)
    off_x, off_y = values - x[:, None, None], truth - y[:, None, None]
    scale = count / (count - 1).clamp(min=1)
    spread = (mean(off_x * off_x) + mean(off_y * off_y)) * scale
    together = 4 * x * y * mean(off_x * off_y) * scale
    apart = (x * x + y * y) * spread
    score = together / (apart + EPS)
    return torch.where(together != 0, score, (apart == 0).float())


# --------------------------------------------------------------------------- weighted F-measure


def weighted_f(values: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """F-measure in which an error weighs less beside the object's other errors and more far away from the object."""
    error = (values - inside.float()).abs()
    distance, place = nearest_inside(inside)
    nearest = error.flatten(1).gather(1, place.flatten(1)).view_as(error)
    eased = torch.minimum(error, _blurred(torch.where(inside, error, nearest)))
    importance = 2 - torch.exp(-0.6931471805599453 / 5 * distance)
    inner = torch.where(inside, eased, 0).sum(dim=(1, 2))
    outer = torch.where(inside, 0, error * importance).sum(dim=(1, 2))
    count = inside.sum(dim=(1, 2))
    recall = 1 - inner / count.clamp(min=1)
    precision = (count - inner) / (count - inner + outer + EPS)
    return torch.where(count > 0, 2 * recall * precision / (recall + precision + EPS), 0.0)


def _blurred(values: torch.Tensor) -> torch.Tensor:
    window = _gaussian(values.device, values.dtype)
    rows = F.conv2d(values[:, None], window.view(1, 1, 7, 1), padding=(3, 0))
    return F.conv2d(rows, window.view(1, 1, 1, 7), padding=(0, 3))[:, 0]


@functools.cache
def _gaussian(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Kept on the device: a copy from the host would wait for everything before it."""
    places = torch.arange(-3, 4, dtype=torch.float64)
    window = torch.exp(-places * places / (2 * 5**2))
    return (window / window.sum()).to(device, dtype)


# --------------------------------------------------------------------------- E-measure


def mean_e(values: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Enhanced alignment, the mean over 256 thresholds, by counting each level once instead of each threshold."""
    size = values[0].numel()
    level = (values * (LEVELS - 1)).long().flatten(1)
    at_least = _counts_from_above(level, inside.flatten(1))  # pixels of the object at or above each threshold
    found = _counts_from_above(level, torch.ones_like(inside.flatten(1)))
    object_size = inside.sum(dim=(1, 2), dtype=torch.float64)[:, None]
    truth, guess = object_size / size, found / size
    total = torch.zeros_like(found)
    for count, guessed, true in (
        (at_least, 1 - guess, 1 - truth),
        (found - at_least, 1 - guess, -truth),
        (object_size - at_least, -guess, 1 - truth),
        (size - found - (object_size - at_least), -guess, -truth),
    ):
        aligned = 2 * guessed * true / (guessed**2 + true**2 + EPS)
        total = total + count * (aligned + 1) ** 2 / 4
    total = torch.where(object_size == 0, size - found, torch.where(object_size == size, found, total))
    return (total / (size - 1 + EPS)).mean(dim=1).float()


def _counts_from_above(level: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros(len(level), LEVELS, device=level.device, dtype=torch.float64)
    counts.scatter_add_(1, level, where.to(torch.float64))
    return counts.flip(1).cumsum(dim=1)


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
