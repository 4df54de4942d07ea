"""Camouflaged object detection in two stages (guides 1 and 3): COD10K-v3, any timm backbone, a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fulltilt.recipes.cod.options import CodOptions
from fulltilt.recipes.recipe import Recipe, Request, on_engine

if TYPE_CHECKING:
    from fulltilt.train.job import Job


def _check_options(request: Request) -> None:
    from fulltilt.recipes.cod.backbone import check_backbone

    options: CodOptions = request.options
    check_backbone(options.backbone, options.img_size, options.weights)


def _check(request: Request) -> None:
    from fulltilt.recipes.cod.preflight import check

    check(request)


def _build(request: Request) -> Job:
    from fulltilt.recipes.cod.job import build

    return build(request)


def _run(request: Request) -> Mapping[str, float]:
    checkpoint = request.resume_from
    if request.options.skip_stage1 and checkpoint is not None and checkpoint.is_dir():
        # Stage 2 begins at its beginning, with these weights: the position in the other run means nothing here.
        request = replace(request, resume_from=checkpoint / "model.safetensors")
    return on_engine(_build)(request)


RECIPE = Recipe(
    name="cod",
    about="Camouflaged object detection on COD10K-v3 folders, in two stages.",
    options=CodOptions,
    check_options=_check_options,
    check=_check,
    run=_run,
    made="cod",
    made_size=1000,
    settings={
        "epochs": 120,
        "batch_size": 8,
        "lr": 4e-4,
        "min_lr": 1e-5,
        "weight_decay": 1e-4,
        "clip_norm": 1.0,
        "cuda_graphs": True,
        "monitor": "iou",
    },
)
