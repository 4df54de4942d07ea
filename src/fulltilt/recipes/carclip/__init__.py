"""carclip: pictures and captions of cars with CLIP (guide 2), contrastive over all of a step, whatever its parts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fulltilt.recipes.carclip.options import CarClipOptions
from fulltilt.recipes.recipe import Recipe, Request

__all__ = ["RECIPE"]


def _check_options(request: Request) -> None:
    from fulltilt.recipes.carclip.build import check_options

    check_options(request)


def _check(request: Request) -> None:
    from fulltilt.recipes.carclip.build import check

    check(request)


def _run(request: Request) -> Mapping[str, float]:
    from fulltilt.recipes.carclip.build import run

    return run(request)


RECIPE = Recipe(
    name="carclip",
    about="Train CLIP on pictures of cars and what is said of them (guide 2).",
    options=CarClipOptions,
    check_options=_check_options,
    check=_check,
    run=_run,
    made="cars",
    made_size=4000,
    # Batch, workers and epochs are guide 2's. A step must compare whole batches, or its last one would be easier.
    settings=MappingProxyType(
        {
            "batch_size": 96,
            "workers": 8,
            "epochs": 20,
            "lr": 5e-4,
            "weight_decay": 0.1,
            "warmup_epochs": 1.0,
            "clip_norm": 1.0,
            "cuda_graphs": True,
            "drop_last": True,
            "monitor": "recall_at_1",
        }
    ),
)
