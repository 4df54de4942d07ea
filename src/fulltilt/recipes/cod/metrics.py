"""The measures of the field, for a whole batch at once and on its device: one value for each picture.

IoU at one half, S-measure (Fan 2017) and MAE. As in the reference implementation, pysodmetrics, a prediction is
stretched to the range 0 to 1 first, except for IoU.
Pictures are measured at the size they are trained at, which is cheap enough for every epoch. Papers measure at the
mask's own size: these figures compare runs of this recipe, not with theirs.
"""

from __future__ import annotations

import torch

EPS = torch.finfo(torch.float64).eps
LEVELS = 256


def measure(probability: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of probabilities and masks [batch, 1, height, width]: all measures, each [batch]. Only of mae less is better."""
    raw, inside = probability[:, 0].float(), mask[:, 0] > 0
    stretched = stretch(raw)
    return {
        "iou": iou(raw, inside),
        "s_measure": s_measure(stretched, inside),
        "mae": (stretched - inside.float()).abs().mean(dim=(1, 2)),
    }


def stretch(values: torch.Tensor) -> torch.Tensor:
    """Each picture of [batch, height, width] in 256 levels from 0 to 1, as if saved as an image and loaded again."""
    values = torch.floor(values.double() * (LEVELS - 1)) / (LEVELS - 1)
    low, high = values.amin(dim=(1, 2), keepdim=True), values.amax(dim=(1, 2), keepdim=True)
    return torch.where(high > low, (values - low) / (high - low).clamp(min=EPS), values).float()


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
