"""`fulltilt make-data`: small data sets in the formats that the recipes read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = ("fulltilt make-data cod data/cod --size 200", "fulltilt make-data text data/text --seed 1")


def make_data(
    kind: Annotated[str, typer.Argument(metavar="KIND", show_default=False, help="cod, cars, text or hdf5.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="A new or empty folder.")],
    size: Annotated[int, typer.Option(min=1, metavar="N", help="How many samples, training and test together.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Random seed: the same seed gives the same files.")] = 0,
) -> None:
    """Make a small data set to try a recipe with.

    The data can be learnt but is not easy, and has the format that the recipe reads.
    """
    from fulltilt.figures import count
    from fulltilt.recipes.synthetic import KINDS, make_folder

    began_s = time.monotonic()
    if make_folder(kind, folder, size, seed):
        print(f"Made {count(KINDS[kind], size)} in {folder} ({time.monotonic() - began_s:.1f} s)")
    else:
        print(f"{folder} has this data already")
