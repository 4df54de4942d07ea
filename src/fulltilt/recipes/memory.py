"""What a run was asked for the last time, so that one that goes on can say what is different now."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.errors import MachineError, UsageError
from fulltilt.recipes import kept_loading
from fulltilt.recipes.recipe import Recipe, Request

FILE = "recipe.json"
ANOTHER_OUT = "Choose another folder with --out."


def refuse_foreign(recipe: Recipe, request: Request) -> None:
    """Raise UsageError for a file, or for the folder of another recipe: nothing is to be made in that one."""
    if request.out.is_file():
        raise UsageError(f"--out {request.out} is a file, not a folder", "Give a folder.")
    other = _noted(request.out).get("recipe", recipe.name)
    if other != recipe.name and not request.fresh:
        raise UsageError(f"{request.out} holds a run of the recipe {other}", f"{ANOTHER_OUT[:-1]}, or use --fresh.")


def changes(recipe: Recipe, request: Request) -> list[str]:
    """Note the recipe's options in the run's folder; a line when they were others before and the run goes on.

    The engine says the same of its own settings. Only the first rank notes and tells. Raises MachineError for a folder
    that cannot be written.
    """
    from fulltilt.train.distributed import detect

    if detect().rank:
        return []
    path = request.out / FILE
    now = {"recipe": recipe.name, "data": str(request.data), **asdict(request.options)}
    before = _noted(request.out)
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        store.write_json(path, now)
    except OSError as error:
        raise MachineError(f"cannot write into {request.out}: {error.strerror or error}", ANOTHER_OUT) from error
    if request.fresh:
        return []
    changed = [f"{name} {before[name]} → {now[name]}" for name in now if name in before and before[name] != now[name]]
    return [f"Changed since the last run: {', '.join(changed)}"] if changed else []


@contextlib.contextmanager
def taken_back_when_refused(out: Path) -> Iterator[None]:
    """Put back what stood in the notes of ``out`` when the run is refused: it has changed nothing there."""
    before = {path: _content(path) for path in (out / FILE, out / kept_loading.FILE)}
    try:
        yield
    except UsageError:
        with contextlib.suppress(OSError):  # the refusal is what is to be told
            for path, content in before.items():
                if content is None:
                    path.unlink(missing_ok=True)
                elif content != _content(path):
                    path.write_bytes(content)
        raise


def _noted(out: Path) -> dict[str, Any]:
    try:
        found = json.loads((out / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
