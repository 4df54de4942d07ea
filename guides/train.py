"""The ViSoBERT trainer: `python train.py`, configured by ./config.yaml, or else by the one beside this file.

It is `fulltilt train visobert`; every flag of the recipe works too: `fulltilt train visobert --help`.
"""

import sys
from pathlib import Path

try:
    from fulltilt.cli.main import main
except ImportError:
    sys.exit("Fulltilt is not installed in this Python. From the folder above: pip install '.[train,recipes,hf]'")


def config(arguments: list[str]) -> list[str]:
    """The flag for the config file, unless another one was given."""
    if any(argument.partition("=")[0] == "--config" for argument in arguments):
        return []
    here = Path("config.yaml")
    return ["--config", str(here if here.is_file() else Path(__file__).with_name("config.yaml"))]


if __name__ == "__main__":
    main(["train", "visobert", *config(sys.argv[1:]), *sys.argv[1:]])
