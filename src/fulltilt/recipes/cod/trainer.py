"""The cod recipe as a job of the engine: data, augmentation, the two stages, the loss and what is measured."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fulltilt.feed import augment
from fulltilt.recipes.cod import CodOptions, first_stage
from fulltilt.recipes.cod import model as network
from fulltilt.recipes.cod.data import Pictures, pairs
from fulltilt.recipes.cod.loss import deep_loss, structure_loss
from fulltilt.recipes.cod.metrics import measure
from fulltilt.recipes.cod.model import blocks as blocks_of
from fulltilt.recipes.recipe import Request, on_engine
from fulltilt.train.job import Job
from fulltilt.train.schedule import Stage

# Stage 2 has its whole backbone moving after this share of its epochs.
UNFROZEN_AFTER = 0.4


def check_options(request: Request) -> None:
    """Look at the backbone and its weights. Raises UsageError."""
    options: CodOptions = request.options
    network.check_backbone(options.backbone, options.img_size, options.weights)


def run(request: Request) -> Mapping[str, float]:
    """Train, and return the last metrics."""
    checkpoint = request.resume_from
    if request.options.skip_stage1 and checkpoint is not None and checkpoint.is_dir():
        # Stage 2 begins at its beginning, with these weights: the position in the other run means nothing here.
        request = replace(request, resume_from=checkpoint / "model.safetensors")
    return on_engine(build)(request)


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
