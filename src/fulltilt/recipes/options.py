"""The Request of a recipe, from flags and a config file: flags win, and every problem is listed at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from fulltilt.probes.host import cpu_capacity
from fulltilt.recipes.recipe import Recipe, Request
from fulltilt.train import config
from fulltilt.train.config import TrainSettings, option

Record = TypeVar("Record")

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
    union: Any = _union(recipe.options)  # type: ignore[arg-type, unused-ignore]
    source = "the command line" if file is None else f"{file} and the command line"
    whole = config.parse(values, union, source, problems=[*from_flags.problems, *from_file.problems], names=names)
    out = RUNS / recipe.name if whole.out is None else Path(whole.out)
    return Request(
        _part(whole, recipe.options),
        _part(whole, TrainSettings),
        data=out / "synthetic" if whole.data == "synthetic" else Path(whole.data),
        out=out,
        resume_from=None if whole.resume_from is None else Path(whole.resume_from),
        fresh=whole.fresh,
        synthetic=whole.data == "synthetic",
        gpus=whole.gpus,
    )


def _defaults(recipe: Recipe) -> dict[str, Any]:
    """The recipe's defaults; and workers on all CPUs but one, for the training."""
    return {"workers": max(int(cpu_capacity().usable) - 1, 1), **recipe.settings}


def _part(whole: Any, record: type[Record]) -> Record:
    return record(**{entry.name: getattr(whole, entry.name) for entry in dataclasses.fields(record)})  # type: ignore[arg-type]


@functools.cache
def _union(options: type[Any]) -> type[Any]:
    """One record with the fields of all three, so that problems and suggestions cover all of them."""
    records = (options, TrainSettings, RunOptions)
    fields = [
        (entry.name, get_type_hints(record)[entry.name], field(default=entry.default, metadata=dict(entry.metadata)))
        for record in records
        for entry in dataclasses.fields(record)
    ]

    def problems(self: Any) -> list[str]:
        own = [getattr(record, "problems", None) for record in records]
        return [problem for find in own if find is not None for problem in find(self)]

    return dataclasses.make_dataclass("Asked", fields, namespace={"problems": problems}, frozen=True)
