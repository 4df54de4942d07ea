"""How a run was told to load its data, kept in its folder: what a study found holds on without being said again.

Only what leaves the training itself unchanged is taken over. What is said anew wins, in a flag or in a config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.errors import FulltiltError, UsageError
from fulltilt.train import config
from fulltilt.train.settings import TrainSettings

FILE = "loading.json"
KEPT = ("workers", "prefetch", "residency")


def of_the_last_run(out: Path) -> dict[str, Any]:
    """What the run in ``out`` was told last; nothing when there is none, or its file is not what we wrote."""
    try:
        found = json.loads((out / FILE).read_text(encoding="utf-8"))
        said = {name: found[name] for name in KEPT if name in found}
        config.parse(said, TrainSettings)
    except (OSError, ValueError, TypeError, UsageError):
        return {}
    return said


def keep(out: Path, said: Mapping[str, Any]) -> None:
    """Write down what a run was told. A disk that refuses is told elsewhere."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if said or (out / FILE).exists():
            store.write_json(out / FILE, dict(said))
    except (OSError, FulltiltError):
        return


def line(taken_over: Mapping[str, Any]) -> str | None:
    """What holds without having been said, for people."""
    if not taken_over:
        return None
    return f"Loading as this run was told before: {', '.join(f'{name} {value}' for name, value in taken_over.items())}"
