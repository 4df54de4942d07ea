"""The cod recipe as a job of the engine: data, augmentation, the two stages, the loss and what is measured."""

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
from fulltilt.recipes.cod.metrics import measure
from fulltilt.recipes.cod.model import blocks as blocks_of
from fulltilt.recipes.recipe import Request
from fulltilt.train.checkpoint import MODEL_FILE
from fulltilt.train.job import Job, Stage
from fulltilt.train.weight_import import place_of

MOST_LOGIT = 30.0
# How much more a pixel counts whose surroundings are all of the other kind; the value of the field since F3Net.
EDGE_WEIGHT = 5.0
# The surroundings: 31 pixels of a picture of 352, as in the field, and the same share of any other.
EDGE_SHARE = 31 / 352
# Each coarser level counts half as much as the one before it.
DEEP_DECAY = 0.5
# Stage 2 has its whole backbone moving after this share of its epochs.
UNFROZEN_AFTER = 0.4


def check_options(request: Request) -> None:
    """Look at the backbone and its weights. Raises UsageError."""
    options: CodOptions = request.options
    network.check_backbone(options.backbone, options.img_size, options.weights)


def run(request: Request) -> Mapping[str, float]:
    """Train, and return the last metrics."""
    if request.options.skip_stage1 and request.resume_from is not None:
        begin = place_of(request.resume_from)
        if begin.is_dir():
            # Stage 2 begins at its beginning, with these weights: the position in the other run means nothing here.
            request = replace(request, resume_from=begin / MODEL_FILE)
    return request.train(build(request))


def build(request: Request) -> Job:
    """The job of a request whose data was checked."""
    options: CodOptions = request.options
    torch.manual_seed(request.settings.seed)  # the weights are drawn here, before the engine seeds
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
    """The decoder alone on a frozen backbone, then everything; ``blocks`` of the backbone come the deepest first."""
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
    """The loss of a batch of pictures and masks."""
    images, masks = batch
    prediction, auxiliary, deep = model(images, return_deep_supervision=True)
    return deep_loss(prediction, deep if options.deep_supervision else (), auxiliary, masks, options.balance)


def eval_loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """The loss and the measures of the field, as means over a batch."""
    images, masks = batch
    prediction = model(images).float()
    measured = measure(torch.sigmoid(prediction), masks)
    return structure_loss(prediction, masks), {name: values.mean() for name, values in measured.items()}


# In half precision this loss meets NaN: a confident logit makes sigmoid exactly 0 or 1, whose logarithm is infinite,
# and the sums over a picture pass 65504. So everything is float32, cross-entropy is taken from the logits, and they
# are clamped: beyond ±30 the loss of a float32 is flat anyway, and a logit that has run away can still come back.
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
