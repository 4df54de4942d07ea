"""Guide 2: `python scripts/train_car_clip.py --batch_size 128 --gradient_accumulation 2 --num_workers 12 …`.

It is `fulltilt train carclip` under the guide's names of flags and with its defaults. Every flag of the recipe works
too: `fulltilt train carclip --help`.
"""

import sys
from dataclasses import replace

try:
    from fulltilt.cli.main import main
    from fulltilt.recipes import carclip
except ImportError:
    sys.exit("Fulltilt is not installed in this Python. From the folder above: pip install '.[train,recipes]'")

NAMES = {
    "--gradient_accumulation": "--accumulation",
    "--num_workers": "--workers",
    "--no_mixed_precision": "--precision=fp32",
}
# The guide's own; a config file and flags win over them.
DEFAULTS = {"batch_size": 96, "accumulation": 1, "workers": 8, "lr": 2e-5}


def translated(arguments: list[str]) -> list[str]:
    """The guide's flags as the recipe calls them; of a flag given twice the last counts."""
    known = []
    for argument in arguments:
        name, given, value = argument.partition("=")
        if name.startswith("--"):
            name = NAMES.get(name, name.replace("_", "-"))
        known.append(f"{name}{given}{value}")
    return known


def batch_line(arguments: list[str]) -> str | None:
    """The guide's word that nothing overrides the batch size. A config file may set it too: the training says it."""
    words = " ".join(arguments).replace("=", " ").split()
    sizes = [words[place + 1] for place, word in enumerate(words[:-1]) if word in ("--batch_size", "--batch-size")]
    if sizes:
        return f"Using batch size: {sizes[-1]} (from command line)"
    return None if {"--config", "--help"} & set(words) else f"Using batch size: {DEFAULTS['batch_size']} (default)"


if __name__ == "__main__":
    if (line := batch_line(sys.argv[1:])) is not None:
        print(line, flush=True)
    carclip.RECIPE = replace(carclip.RECIPE, settings={**carclip.RECIPE.settings, **DEFAULTS})
    main(["train", "carclip", *translated(sys.argv[1:])])
