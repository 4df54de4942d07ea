"""The COD10K two-stage trainer: `python train_ultimate.py train --dataset-path … --checkpoint-dir … …`.

It is `fulltilt train cod` under the names of its flags, on all GPUs that are there. Every flag of the recipe works
too: `fulltilt train cod --help`.
"""

import sys
from dataclasses import replace

try:
    from fulltilt.cli.main import main
    from fulltilt.recipes import cod
except ImportError:
    sys.exit("Fulltilt is not installed in this Python. From the folder above: pip install '.[train,recipes]'")

NAMES = {
    "--dataset-path": "--data",
    "--checkpoint-dir": "--out",
    "--accumulation-steps": "--accumulation",
    "--scheduler": "--schedule",
    "--num-workers": "--workers",
}
USAGE = "Usage: python train_ultimate.py train --dataset-path DIR --checkpoint-dir DIR [--backbone …]"
# These are switched on by name, so without the name they are off.
OFF = {"progressive_unfreeze": False, "deep_supervision": False}


def translated(arguments: list[str]) -> list[str]:
    """That trainer's flags as the recipe calls them; of a flag given twice the last counts."""
    known = []
    for argument in arguments:
        name, given, value = argument.partition("=")
        known.append(f"{NAMES.get(name, name)}{given}{value}")
    return known


def gpus() -> list[str]:
    """All GPUs that are visible take part."""
    import torch

    return ["--gpus", str(torch.cuda.device_count())] if torch.cuda.device_count() > 1 else []


if __name__ == "__main__":
    verb, *rest = sys.argv[1:] or ["--help"]
    if verb != "train":
        asked = verb in ("--help", "-h")
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    cod.RECIPE = replace(cod.RECIPE, settings={**cod.RECIPE.settings, **OFF})
    main(["train", "cod", *gpus(), *translated(rest)])
