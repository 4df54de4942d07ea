"""`fulltilt make-data`: small data sets in the real formats of the recipes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("make-data")(make_data)


def make_data(
    kind: Annotated[str, typer.Argument(metavar="cod|cars|text|hdf5", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    size: Annotated[int, typer.Option(min=1, help="How many samples, training and test together.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same files.")] = 0,
) -> None:
    """Make a data set that can be learnt but is not easy, in the format that its recipe reads."""
    from fulltilt.figures import count
    from fulltilt.recipes.synthetic import KINDS, make_folder

    began_s = time.monotonic()
    if make_folder(kind, folder, size, seed):
        print(f"Made {count(KINDS[kind], size)} in {folder} ({time.monotonic() - began_s:.1f} s)")
    else:
        print(f"{folder} holds them already")
