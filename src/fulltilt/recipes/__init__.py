"""Four trainers, found by name and loaded when one is asked for.

Each recipe is a package with a ``RECIPE`` in its ``__init__``, which imports no torch: flags and help stay fast.
"""

from __future__ import annotations

import importlib
import importlib.util

from fulltilt.errors import UsageError
from fulltilt.recipes.recipe import Recipe
from fulltilt.train.config import did_you_mean

__all__ = ["RECIPES", "find", "require"]

RECIPES = {
    "cod": "camouflaged objects in images",
    "carclip": "images and captions of cars with CLIP",
    "visobert": "short social text in classes",
    "hdf5": "windows of features, yes or no",
}

# What each one imports besides Fulltilt's own dependencies, and the extras that bring it.
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
