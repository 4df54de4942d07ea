"""`fulltilt demo`: a recipe on made data, with its progress, its verdict and its page; minutes on two CPU cores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Small enough for two cores, and still the whole recipe: both stages, experts, all measures.
DEMO = {
    "backbone": "test_resnet",
    "img_size": 64,
    "decoder_width": 32,
    "epochs": 12,
    "stage1_epochs": 2,
    "batch_size": 16,
    "lr": 3e-3,
    "stage2_lr": 3e-3,
}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Where the run goes.")] = Path("fulltilt-runs/demo"),
) -> None:
    """Train camouflaged object detection on made data for about two minutes, and explain where the time went."""
    from fulltilt.cli.train import run_recipe
    from fulltilt.recipes import find

    raise typer.Exit(run_recipe(find("cod"), {**DEMO, "out": str(out), "fresh": True}))
