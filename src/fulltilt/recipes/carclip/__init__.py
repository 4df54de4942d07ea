"""Pictures and captions of cars with CLIP: the contrastive loss is over all of a step, whatever its parts."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from fulltilt.recipes.recipe import Recipe, imported
from fulltilt.train.config import option

__all__ = ["RECIPE", "CarClipOptions"]

# What is said of a car whose make, model and year are known. Which of them a picture gets changes with every epoch.
TEMPLATES = (
    "a photo of a {year} {make} {model}",
    "a {make} {model} from {year}",
    "a {make} {model} car, model year {year}",
    "a picture of the {year} {make} {model} on the road",
    "the {make} {model} of {year}",
    "side view of a {year} {make} {model}",
)

# Models that need no download: CLIP with random weights, in two sizes.
BUILT_IN = ("small", "vit-b-32")
GIVE = "Give a folder with config.json, weights and tokenizer, or a hub name that this machine can reach."


@dataclass(frozen=True, slots=True)
class CarClipOptions:
    """What is particular to this trainer."""

    model: str = option("auto", "A folder or hub name of a CLIP model, or small or vit-b-32 (random weights).")
    image_size: int | None = option(
        None, "Side of the pictures in pixels, for small and vit-b-32.", least=32, most=1024
    )
    templates: str | None = option(None, "A file of caption templates, one a line, with {make}, {model}, {year}.")
    freeze: Literal["none", "image", "text", "both"] = option("none", "Towers whose weights stay as they are.")
    temperature: float = option(0.07, "Where the temperature starts, for small and vit-b-32.", above=0.01, most=1)
    learn_temperature: bool = option(True, "Let the temperature move with the weights.")
    val_share: float = option(
        0.1, "Share of the pictures to validate on, where the data has no split.", above=0, most=0.9
    )
    augment: bool = option(True, "Crop, flip and light every picture anew in every epoch.")
    export: bool = option(True, "Leave the trained model as OUT/model in Hugging Face's format.")


RECIPE = Recipe(
    name="carclip",
    about="Train CLIP on pictures of cars and what is said of them.",
    options=CarClipOptions,
    check_options=imported("fulltilt.recipes.carclip.trainer:check_options"),
    check=imported("fulltilt.recipes.carclip.trainer:check"),
    run=imported("fulltilt.recipes.carclip.trainer:run"),
    synthetic="cars",
    synthetic_size=4000,
    # A step must compare whole batches, or its last one would be easier.
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
