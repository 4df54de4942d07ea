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

# What each one imports besides Fulltilt's own dependencies: module, name to install, extra.
_TRAIN = ("safetensors", "safetensors", "train")
_NUMPY = ("numpy", "numpy", "recipes")
_IMAGES = ("PIL", "pillow", "recipes")
_NEEDED = {
    "cod": (_TRAIN, _NUMPY, _IMAGES, ("timm", "timm", "recipes")),
    "carclip": (_TRAIN, _NUMPY, _IMAGES, ("transformers", "transformers", "recipes")),
    "visobert": (_TRAIN, _NUMPY, ("transformers", "transformers", "recipes")),
    "hdf5": (_TRAIN, _NUMPY, ("h5py", "h5py", "hdf5")),
}


def find(name: str) -> Recipe:
    """The recipe of that name. Raises UsageError with what was probably meant."""
    if name not in RECIPES:
        raise UsageError(f"there is no recipe {name!r}{did_you_mean(name, RECIPES)}", f"Recipes: {', '.join(RECIPES)}.")
    recipe: Recipe = importlib.import_module(f"{__name__}.{name}").RECIPE
    return recipe


def require(name: str) -> None:
    """Raise UsageError with the line that installs what the recipe lacks here."""
    needed = _NEEDED[name]
    missing = [package for module, package, _ in needed if not _installed(module)]
    if missing:
        extras = ",".join(dict.fromkeys(extra for _, _, extra in needed))
        raise UsageError(
            f"fulltilt train {name} needs {' and '.join(missing)}, which this Python does not have",
            f'Install: pip install "fulltilt[{extras}]"',
        )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # somebody has barred it
        return False
