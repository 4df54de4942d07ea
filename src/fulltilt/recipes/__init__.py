"""Four trainers. Each is a package whose ``__init__`` holds a ``RECIPE`` and imports no torch: help stays fast."""

from __future__ import annotations

import importlib
import importlib.util

from fulltilt.errors import UsageError
from fulltilt.recipes.recipe import Recipe
from fulltilt.train.config import did_you_mean

__all__ = ["RECIPES", "find", "require"]

RECIPES = {
    "cod": "camouflaged object detection",
    "carclip": "CLIP on images and captions of cars",
    "visobert": "text classification with a transformer",
    "hdf5": "binary classification of feature windows",
}

# What each recipe imports besides Fulltilt's own dependencies, and the extras that install it.
_NEEDED = {
    "cod": (("safetensors", "numpy", "PIL", "timm"), "train,recipes"),
    "carclip": (("safetensors", "numpy", "PIL", "torchvision", "transformers"), "train,recipes"),
    "visobert": (("safetensors", "numpy", "transformers"), "train,recipes"),
    "hdf5": (("safetensors", "numpy", "h5py"), "train,recipes,hdf5"),
}


def find(name: str) -> Recipe:
    """The recipe of that name. Raises UsageError with what was probably meant."""
    if name not in RECIPES:
        raise UsageError(f"there is no recipe {name!r}{did_you_mean(name, RECIPES)}", f"Recipes: {', '.join(RECIPES)}.")
    recipe: Recipe = importlib.import_module(f"{__name__}.{name}").RECIPE
    return recipe


def require(name: str) -> None:
    """Raise UsageError with the line that installs what the recipe lacks here."""
    modules, extras = _NEEDED[name]
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(
            f"fulltilt train {name} needs {' and '.join(missing)}, which this Python does not have",
            f'Install: pip install "fulltilt[{extras}]"',
        )
