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
# What differences of sums leave behind of nothing.
TINY = 1e-12


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
    x, y = values.double(), inside.double()
    share, mean = y.mean(dim=(1, 2)), x.mean(dim=(1, 2))
    mixed = (0.5 * _by_object(x, y, share) + 0.5 * _by_quarter(x, y)).clamp(min=0)
    return torch.where(share == 0, 1 - mean, torch.where(share == 1, mean, mixed)).float()


def _by_object(x: torch.Tensor, y: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    return share * _even(x, y) + (1 - share) * _even(1 - x, 1 - y)


def _even(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """How high and even the values are in a region, which is 1 inside and 0 outside."""
    count, seen = where.sum(dim=(1, 2)).clamp(min=1), x * where
    mean = seen.sum(dim=(1, 2)) / count
    spread = ((seen * seen).sum(dim=(1, 2)) - count * mean**2).clamp(min=0)
    deviation = torch.sqrt(spread / (count - 1).clamp(min=1))
    return 2 * mean / (mean**2 + 1 + deviation + EPS)


def _by_quarter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The structural similarity in each quarter. Sums over rectangles are products with rows and columns of ones."""
    rows, columns = y.sum(dim=2), y.sum(dim=1)
    count = rows.sum(dim=1).clamp(min=1)
    vertical, horizontal = _halves(rows, count), _halves(columns, count)

    def total(of: torch.Tensor) -> torch.Tensor:
        return vertical @ of @ horizontal.mT  # [batch, 2, 2]

    size = vertical.sum(dim=2)[:, :, None] * horizontal.sum(dim=2)[:, None, :]
    count = size.clamp(min=1)
    of_x, of_y = total(x) / count, total(y) / count
    scale = 1 / (count - 1).clamp(min=1)
    spread = ((total(x * x) - count * of_x**2) + (total(y) - count * of_y**2)) * scale
    shared = (total(x * y) - count * of_x * of_y) * scale
    together, apart = 4 * of_x * of_y * shared, (of_x**2 + of_y**2) * spread
    likeness = torch.where(together.abs() > TINY, together / (apart + EPS), (apart < TINY).double())
    return (likeness * size).sum(dim=(1, 2)) / y[0].numel()


def _halves(marks: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Before and behind the object's centre along one axis, as ones and zeros: [batch, 2, length]."""
    places = torch.arange(marks.shape[1], device=marks.device, dtype=marks.dtype)
    behind = (places > torch.round((marks * places).sum(dim=1) / count)[:, None]).to(marks.dtype)
    return torch.stack([1 - behind, behind], dim=1)
