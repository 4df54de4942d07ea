"""The guides' four trainers, found by name and loaded when one is asked for.

Each recipe is a package with a ``RECIPE`` in its ``__init__``, which imports no torch: flags and help stay fast.
"""

from __future__ import annotations

import difflib
import importlib

from fulltilt.errors import UsageError
from fulltilt.recipes.recipe import Recipe

__all__ = ["RECIPES", "find"]

RECIPES = {
    "cod": "camouflaged objects in images (guides 1 and 3)",
    "carclip": "images and captions of cars with CLIP (guide 2)",
    "visobert": "short social text in classes (guide 4)",
    "hdf5": "windows of features, yes or no (guide 5)",
}


def find(name: str) -> Recipe:
    """The recipe of that name. Raises UsageError with what was probably meant."""
    if name not in RECIPES:
        close = difflib.get_close_matches(name[:80], RECIPES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"there is no recipe {name!r}{hint}", f"Recipes: {', '.join(RECIPES)}.")
    recipe: Recipe = importlib.import_module(f"{__name__}.{name}").RECIPE
    return recipe
