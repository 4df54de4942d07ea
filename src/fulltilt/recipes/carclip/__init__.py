"""CLIP on images and captions of cars: the contrastive loss covers the whole step, also under accumulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fulltilt.recipes.recipe import Recipe, imported
from fulltilt.train.config import option

__all__ = ["RECIPE", "CarClipOptions"]

# Captions for a car of known make, model and year. An image gets another one in every epoch.
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
    """The options of this recipe."""

    model: str = option("auto", "Folder or hub name of a CLIP model, or small or vit-b-32 (random weights).")
    image_size: int | None = option(None, "Image size in pixels, for small and vit-b-32.", least=32, most=1024)
    templates: str | None = option(None, "File of caption templates, one per line, with {make}, {model}, {year}.")
    freeze: Literal["none", "image", "text", "both"] = option("none", "Towers to freeze.")
    temperature: float = option(0.07, "Initial temperature, for small and vit-b-32.", above=0.01, most=1)
    learn_temperature: bool = option(True, "Train the temperature.")
    val_share: float = option(0.1, "Share of the images to validate on, if the data has no split.", above=0, most=0.9)
    augment: bool = option(True, "Random crops, flips, brightness and contrast.")
    export: bool = option(True, "Save the trained model in Hugging Face's format as OUT/model.")


RECIPE = Recipe(
    name="carclip",
    about="Train CLIP on images of cars and their captions.",
    options=CarClipOptions,
    check_options=imported("fulltilt.recipes.carclip.trainer:check_options"),
    check=imported("fulltilt.recipes.carclip.trainer:check"),
    run=imported("fulltilt.recipes.carclip.trainer:run"),
    synthetic="cars",
    synthetic_size=4000,
    settings={
        "batch_size": 96,
        "workers": 8,
        "epochs": 20,
        "lr": 5e-4,
        "weight_decay": 0.1,
        "warmup_epochs": 1.0,
        "clip_norm": 1.0,
        "cuda_graphs": True,
        "drop_last": True,  # the loss compares the samples of a batch: a smaller last one would be easier
        "monitor": "recall_at_1",
    },
)
