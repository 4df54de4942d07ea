"""The Request of a recipe, from flags and a config file: flags win, and every problem is listed at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from fulltilt.probes.host import cpu_capacity
from fulltilt.recipes.recipe import Recipe, Request
from fulltilt.train import config
from fulltilt.train.config import TrainSettings, option

# Where results go without --out.
RUNS = Path("fulltilt-runs")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Data, results and GPUs of a training."""

    data: str = option("synthetic", "Data folder, or synthetic for generated data.")
    out: str | None = option(None, "Folder for checkpoints and report; the same command resumes from it.")
    resume_from: str | None = option(None, "Checkpoint folder, or a weights file of another trainer.")
    fresh: bool = option(False, "Start anew instead of resuming from --out.")
    gpus: int | None = option(None, "Number of GPUs to train on.", least=1)

    def problems(self) -> list[str]:
        """Empty paths, as from a shell variable that is not set; they would mean the current folder."""
        return [f"{name} is empty" for name in ("data", "out", "resume_from") if getattr(self, name) == ""]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a recipe, as the command line shows it."""

    name: str
    kind: Any
    default: Any
    help: str


def flags(recipe: Recipe) -> list[Flag]:
    """All flags of a recipe but ``--config``."""
    listed = []
    defaults = _defaults(recipe)
    for record in (RunOptions, TrainSettings, recipe.options):
        kinds = get_type_hints(record)
        for entry in dataclasses.fields(record):
            if help := entry.metadata.get("help"):
                listed.append(Flag(entry.name, kinds[entry.name], defaults.get(entry.name, entry.default), help))
    return listed


def read(recipe: Recipe, given: Mapping[str, Any], file: Path | None = None) -> Request:
    """The Request of flags (``given``) and config file. Raises UsageError listing every problem of both."""
    from_flags, from_file = recipe.translate(given), recipe.translate({} if file is None else config.read(file))
    given = from_flags.values
    # The setting of the flag --max-time has its unit in its name.
    values = {"max_time_s" if key == "max_time" else key: value for key, value in from_file.values.items()}
    names = {"max_time_s": "max_time", **{key: name for key, name in from_file.names.items() if key not in given}}
    values = {**_defaults(recipe), **values, **given}
    source = "the command line" if file is None else f"{file} and the command line"
    own, settings, run = config.parse_together(
        values,
        (recipe.options, TrainSettings, RunOptions),
        source,
        problems=[*from_flags.problems, *from_file.problems],
        names=names,
    )
    found = own.problems(settings) if hasattr(own, "problems") else []
    config.refuse([*found, *settings.problems(), *run.problems()], source)
    out = RUNS / recipe.name if run.out is None else Path(run.out)
    return Request(
        own,
        settings,
        data=out / "synthetic" if run.data == "synthetic" else Path(run.data),
        out=out,
        resume_from=None if run.resume_from is None else Path(run.resume_from),
        fresh=run.fresh,
        synthetic=run.data == "synthetic",
        gpus=run.gpus,
    )


def _defaults(recipe: Recipe) -> dict[str, Any]:
    """The recipe's defaults; and workers on all CPUs but one, for the training."""
    return {"workers": max(int(cpu_capacity().usable) - 1, 1), **recipe.settings}
