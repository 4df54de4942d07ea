"""The folder of a training: claimed before anything is written, with the options of the last run in it.

Libraries that write folders of their own (models, tokenizers) get a private one, which then takes its place.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.errors import ForeignFiles, FulltiltError, UsageError
from fulltilt.recipes.recipe import Recipe, Request
from fulltilt.records.secrets import mask_config

RECIPE_FILE = "recipe.json"  # recipe, data and options, without secrets: a run that goes on says what is different
_ANOTHER_OUT = "Choose another folder with --out."


def claim(out: Path) -> store.OwnedFolder:
    """The folder of a training, made or taken over. Raises ForeignFiles, UsageError, MachineError."""
    from fulltilt.train import checkpoint  # torch, which flags and help do without

    return checkpoint.claim(out)


def refuse_other_recipe(recipe: Recipe, request: Request) -> None:
    """Raise UsageError for the folder of another recipe, unless it is to begin anew."""
    other = _read_options(request.out).get("recipe", recipe.name)
    if other != recipe.name and not request.fresh:
        raise UsageError(f"{request.out} holds a run of the recipe {other}", f"{_ANOTHER_OUT[:-1]}, or use --fresh.")


# --------------------------------------------------------------------------- the last run's options


@contextlib.contextmanager
def options_written(recipe: Recipe, request: Request) -> Iterator[str | None]:
    """Write down the recipe's options; gives a line when they were others before and the run goes on.

    The engine says the same of its own settings. Those of the last run are put back when this one is refused: it has
    changed nothing. Raises ForeignFiles, MachineError.
    """
    folder, file = store.OwnedFolder(request.out), request.out / RECIPE_FILE
    kept = file.read_bytes() if folder.owns(RECIPE_FILE) else None
    before = _read_options(request.out)
    now = mask_config({"recipe": recipe.name, "data": str(request.data), **asdict(request.options)})
    changed = [f"{name} {before[name]} → {now[name]}" for name in now if name in before and before[name] != now[name]]
    store.write_json(file, now)
    try:
        yield f"Changed since the last run: {', '.join(changed)}" if changed and not request.fresh else None
    except UsageError:
        with contextlib.suppress(OSError, FulltiltError):  # the refusal is what is to be told
            if kept is None:
                folder.remove(RECIPE_FILE)
            else:
                folder.write(RECIPE_FILE, kept)
        raise


def _read_options(out: Path) -> dict[str, Any]:
    try:
        if not store.OwnedFolder(out).owns(RECIPE_FILE):
            return {}
        found = json.loads((out / RECIPE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# --------------------------------------------------------------------------- folders that a library writes


@contextlib.contextmanager
def written_by_library(target: Path) -> Iterator[Path]:
    """A new private folder for a library to write into, which takes the place of ``target`` when all is written.

    Raises ForeignFiles where anything in ``target`` is not Fulltilt's own.
    """
    folder = claim(target.parent)
    refuse_foreign(target)
    remove_private(folder, f".{target.name}.*.tmp")  # of a run that was killed
    private, before = folder.make(folder.temporary(target)), folder.temporary(target)
    try:
        yield private
        folder.record_tree(private)
        refuse_foreign(target)
        if target.exists():
            folder.move(target, before)
        folder.move(private, target)
    finally:
        remove_private(folder, private.name)
        folder.remove(before)


def remove_private(folder: store.OwnedFolder, pattern: str) -> None:
    """Remove folders that Fulltilt has made for a library alone, with whatever it wrote there before it was ended."""
    for private in folder.path.glob(pattern):
        if folder.owns(private):
            folder.record_tree(private)
            folder.remove(private)


def refuse_foreign(target: Path) -> None:
    """Raise ForeignFiles unless ``target``, an entry of a training's folder, is free or ours with all that is in it."""
    folder = store.OwnedFolder(target.parent)
    folder.check(target)
    foreign = [path for path in sorted(target.rglob("*")) if not folder.owns(path)]
    if foreign:
        raise ForeignFiles(f"{foreign[0]} was not written by Fulltilt and is left as it is", "Move it elsewhere.")


def refuse_to_replace(model: str, out: Path) -> None:
    """Raise UsageError for a model to begin with that lies where the trained one will."""
    given, place = Path(model).resolve(), (out / "model").resolve()
    if given.is_dir() and place in (given, *given.parents):
        raise UsageError(f"--model {model} is where this run would put its own model", _ANOTHER_OUT)
