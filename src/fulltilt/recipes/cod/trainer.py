"""The cod recipe as a Job: data, augmentation, the two stages, the loss and the metrics."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from fulltilt.feed import augment
from fulltilt.recipes.cod import CodOptions, first_stage
from fulltilt.recipes.cod import model as network
from fulltilt.recipes.cod.data import Pictures, pairs
from fulltilt.recipes.cod.model import blocks as blocks_of
from fulltilt.recipes.recipe import Request, say
from fulltilt.train.job import Job, Stage
from fulltilt.train.weight_import import load_weights

MOST_LOGIT = 30.0
# The extra weight of a pixel whose surroundings are all of the other class, as in F3Net.
EDGE_WEIGHT = 5.0
# The surroundings: 31 pixels of an image of 352, as in F3Net, and the same share of any other.
EDGE_SHARE = 31 / 352
# Each coarser level counts half as much as the one before it.
DEEP_DECAY = 0.5
# In stage 2 the whole backbone is trained after this share of the epochs.
UNFROZEN_AFTER = 0.4


def check_options(request: Request) -> None:
    """Check the backbone and its weights. Raises UsageError."""
    options: CodOptions = request.options
    network.check_backbone(options.backbone, options.img_size, options.weights)


def run(request: Request) -> Mapping[str, float]:
    """Train, and return the last metrics."""
    job = build(request)
    if request.options.skip_stage1 and request.resume_from is not None:
        # Only the weights are taken: the position in the other run means nothing here.
        taken = load_weights(job.model, request.resume_from)
        say(*taken.lines())
        request = replace(request, resume_from=None)
    return request.train(job)


def build(request: Request) -> Job:
    """The Job of a request."""
    options: CodOptions = request.options
    torch.manual_seed(request.settings.seed)  # the weights are made before the engine seeds
    net = network.build(
        options.backbone,
        options.img_size,
        weights=options.weights,
        width=options.decoder_width,
        num_experts=options.num_experts,
    )
    train, test = (
        Pictures(pairs(request.data, part, noncam=options.include_noncam), options.img_size)
        for part in ("Train", "Test")
    )
    return Job(
        model=net,
        loss=functools.partial(loss, options),
        data=train,
        eval_data=test,
        eval_loss=eval_loss,
        stages=stages(options, request.settings.epochs, blocks_of(net.backbone)),
        augment=augment.Pipeline(
            [
                augment.HorizontalFlip(),
                augment.Affine(degrees=12, translate=(0.06, 0.06), scale=(0.85, 1.25)),
                augment.ColourJitter(brightness=0.2, contrast=0.2, saturation=0.2),
                augment.Normalise(),
            ]
        ),
        eval_augment=augment.Pipeline([augment.Normalise()]),
        name="cod",
    )


def stages(options: CodOptions, epochs: int, blocks: list[tuple[str, ...]]) -> tuple[Stage, ...]:
    """The decoder on a frozen backbone, then everything; ``blocks`` of the backbone are the deepest first."""
    first = first_stage(options, epochs)
    length = epochs - first
    thaw = UNFROZEN_AFTER * length / len(blocks) if options.progressive_unfreeze else 0.0
    whole = Stage(
        "stage 2",
        length,
        lr=options.stage2_lr,
        batch_size=options.stage2_batch_size,
        frozen=("backbone.*",),
        unfreeze=tuple((int(thaw * place), pattern) for place, group in enumerate(blocks) for pattern in group),
    )
    if options.skip_stage1 or not first:
        return (whole,)
    return Stage("stage 1", first, frozen=("backbone.*",)), whole


# --------------------------------------------------------------------------- the loss


def loss(options: CodOptions, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch of images and masks."""
    images, masks = batch
    prediction, auxiliary, deep = model(images, return_deep_supervision=True)
    return deep_loss(prediction, deep if options.deep_supervision else (), auxiliary, masks, options.balance)


def eval_loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """The loss and the metrics, as means over a batch."""
    images, masks = batch
    prediction = model(images).float()
    measured = measure(torch.sigmoid(prediction), masks)
    return structure_loss(prediction, masks), {name: values.mean() for name, values in measured.items()}


# In half precision this loss becomes NaN: a confident logit makes the sigmoid exactly 0 or 1, and the sums over an
# image pass 65504. So it is float32, with cross-entropy from logits, clamped to ±30, where the loss is flat anyway.
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
        # The ones avoid a division by zero for an empty mask.
        return (weighted_entropy + 1.0 - (both + 1.0) / (either + 1.0)).mean()


def deep_loss(
    prediction: torch.Tensor, deep: Sequence[torch.Tensor], auxiliary: torch.Tensor, mask: torch.Tensor, balance: float
) -> torch.Tensor:
    """The loss of the prediction, of the coarser levels (the coarsest first), and of unevenly used experts."""
    mask = mask.float()
    total = structure_loss(prediction, mask)
    weight = DEEP_DECAY
    for logits in reversed(deep):
        # At the level's own size: the mask is shrunk.
        height, width = logits.shape[-2:]
        total = total + weight * structure_loss(logits, F.adaptive_avg_pool2d(mask, (height, width)))
        weight *= DEEP_DECAY
    return total + balance * auxiliary.float()


def _surroundings(mask: torch.Tensor) -> torch.Tensor:
    """The mean of the mask around each pixel, as a separable box filter."""
    reach = max(round(mask.shape[-1] * EDGE_SHARE / 2), 1)
    across = F.avg_pool2d(mask, (1, 2 * reach + 1), stride=1, padding=(0, reach))
    return F.avg_pool2d(across, (2 * reach + 1, 1), stride=1, padding=(reach, 0))


# --------------------------------------------------------------------------- metrics

# For a whole batch on its device, one value per image: IoU at 0.5, S-measure (Fan 2017) and MAE. As in pysodmetrics, a
# prediction is first stretched to the range 0 to 1, except for IoU. Images are measured at the training size; papers
# measure at the mask's own size, so these figures only compare runs of this recipe.
EPS = torch.finfo(torch.float64).eps
LEVELS = 256
# Rounding errors of differences of sums.
TINY = 1e-12


def measure(probability: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """All metrics, each [batch], of probabilities and masks [batch, 1, height, width]. For mae less is better."""
    raw, inside = probability[:, 0].float(), mask[:, 0] > 0
    stretched = stretch(raw)
    return {
        "iou": iou(raw, inside),
        "s_measure": s_measure(stretched, inside),
        "mae": (stretched - inside.float()).abs().mean(dim=(1, 2)),
    }


def stretch(values: torch.Tensor) -> torch.Tensor:
    """Each image of [batch, height, width] in 256 levels from 0 to 1, as if saved and loaded again."""
    values = torch.floor(values.double() * (LEVELS - 1)) / (LEVELS - 1)
    low, high = values.amin(dim=(1, 2), keepdim=True), values.amax(dim=(1, 2), keepdim=True)
    return torch.where(high > low, (values - low) / (high - low).clamp(min=EPS), values).float()


def iou(values: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Intersection over union at a threshold of one half; 1 when both are empty."""
    found = values >= 0.5
    both, either = (found & inside).sum(dim=(1, 2)), (found | inside).sum(dim=(1, 2))
    return torch.where(either > 0, both / either.clamp(min=1), 1.0)


def s_measure(values: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Structural similarity: half of object and background, half of the four quarters about the object's centre."""
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
    """Before and after the object's centre along one axis, as ones and zeros: [batch, 2, length]."""
    places = torch.arange(marks.shape[1], device=marks.device, dtype=marks.dtype)
    after = (places > torch.round((marks * places).sum(dim=1) / count)[:, None]).to(marks.dtype)
    return torch.stack([1 - after, after], dim=1)
