"""The CLIP car trainer: `python scripts/train_car_clip.py --batch_size 128 --gradient_accumulation 2 …`.

It is `fulltilt train carclip` under the names of its flags and with its defaults. Every flag of the recipe works
too: `fulltilt train carclip --help`.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace

try:
    from fulltilt.cli.main import main
    from fulltilt.recipes import carclip
    from fulltilt.recipes.recipe import Request
except ImportError:
    sys.exit("Fulltilt is not installed in this Python. From the folder above: pip install '.[train,recipes]'")

NAMES = {
    "--gradient_accumulation": "--accumulation",
    "--num_workers": "--workers",
    "--no_mixed_precision": "--precision=fp32",
}
RECIPE = carclip.RECIPE
# Its own defaults; a config file and flags win over them.
DEFAULTS = {"batch_size": 96, "accumulation": 1, "workers": 8, "lr": 2e-5}


def translated(arguments: list[str]) -> list[str]:
    """That trainer's flags as the recipe calls them; of a flag given twice the last counts."""
    known = []
    for argument in arguments:
        name, given, value = argument.partition("=")
        if name.startswith("--"):
            name = NAMES.get(name, name.replace("_", "-"))
        known.append(f"{name}{given}{value}")
    return known


def batch_line(arguments: list[str], batch_size: int) -> str | None:
    """A word that nothing overrides the batch size. A config file may set it too: the training says it."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if "--batch-size" in given:
        return f"Using batch size: {batch_size} (from command line)"
    return None if "--config" in given else f"Using batch size: {batch_size} (default)"


def run(request: Request) -> Mapping[str, float]:
    """Train, and say first which batch size it is: once, and of no command line that was refused."""
    from fulltilt.train.distributed import rank_from_env

    line = batch_line(sys.argv[1:], request.settings.batch_size)
    if line is not None and rank_from_env().rank == 0:
        print(line, flush=True)
    return RECIPE.run(request)


if __name__ == "__main__":
    carclip.RECIPE = replace(RECIPE, run=run, settings={**RECIPE.settings, **DEFAULTS})
    main(["train", "carclip", *translated(sys.argv[1:])])
