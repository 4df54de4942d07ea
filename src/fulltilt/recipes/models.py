"""How a model is named: a folder, or a name on the hub."""

from __future__ import annotations

from pathlib import Path

from fulltilt.errors import UsageError


def refuse_missing_folder(model: str) -> None:
    """Raise UsageError for what is meant as a folder and is not there; a hub would be asked for it for a long time.

    Hub names have one slash at most, between owner and name.
    """
    meant = model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model
    if meant and not Path(model).is_dir():
        raise UsageError(f"the model's folder {model} does not exist", "Give another with --model.")
