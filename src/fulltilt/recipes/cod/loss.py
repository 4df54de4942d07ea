"""The loss: weighted cross-entropy plus weighted IoU, both heavier where the mask changes nearby.

In half precision this loss meets NaN: a confident logit makes sigmoid exactly 0 or 1, whose logarithm is infinite, and
the sums over a picture pass 65504. So everything is float32, cross-entropy is taken from the logits, and they are
clamped: beyond ±30 the loss of a float32 is flat anyway, and a logit that has run away can still come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F  # noqa: N812

MOST_LOGIT = 30.0
# How much more a pixel counts whose surroundings are all of the other kind; the value of the field since F3Net.
EDGE_WEIGHT = 5.0
# The surroundings: 31 pixels of a picture of 352, as in the field, and the same share of any other.
EDGE_SHARE = 31 / 352
# Each coarser level counts half as much as the one before it.
DEEP_DECAY = 0.5


def structure_loss(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean loss over a batch; ``logits`` and ``mask`` (0 to 1) are [batch, 1, height, width]."""
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits.float().clamp(-MOST_LOGIT, MOST_LOGIT)
        mask = mask.float()
        weight = 1.0 + EDGE_WEIGHT * (_surroundings(mask) - mask).abs()
        entropy = F.binary_cross_entropy_with_logits(logits, mask, reduction="none")
        dims = (1, 2, 3)
        weighted_entropy = (weight * entropy).sum(dims) / weight.sum(dims)
        hidden = torch.sigmoid(logits)
        both = (weight * hidden * mask).sum(dims)
        either = (weight * (hidden + mask)).sum(dims) - both
        # The ones keep a picture without anything hidden from dividing by nothing.
        return (weighted_entropy + 1.0 - (both + 1.0) / (either + 1.0)).mean()


def deep_loss(
    prediction: torch.Tensor, deep: Sequence[torch.Tensor], auxiliary: torch.Tensor, mask: torch.Tensor, balance: float
) -> torch.Tensor:
    """The loss of the prediction, of the coarser levels (the coarsest first), and of unevenly used experts."""
    mask = mask.float()
    total = structure_loss(prediction, mask)
    weight = DEEP_DECAY
    for logits in reversed(deep):
        # At the level's own size: the mask shrinks instead of the logits growing.
        height, width = logits.shape[-2:]
        total = total + weight * structure_loss(logits, F.adaptive_avg_pool2d(mask, (height, width)))
        weight *= DEEP_DECAY
    return total + balance * auxiliary.float()


def _surroundings(mask: torch.Tensor) -> torch.Tensor:
    """The mean of the mask around each pixel; in two passes, because a square of 31 would look at 961 pixels each."""
    reach = max(round(mask.shape[-1] * EDGE_SHARE / 2), 1)
    across = F.avg_pool2d(mask, (1, 2 * reach + 1), stride=1, padding=(0, reach))
    return F.avg_pool2d(across, (2 * reach + 1, 1), stride=1, padding=(reach, 0))
