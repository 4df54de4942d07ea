"""The parts of a recipe: its options, the check of its data, and its training."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.records.secrets import mask_config
from fulltilt.train.config import TrainSettings

if TYPE_CHECKING:
    from fulltilt.train.job import Job
    from fulltilt.train.progress import TrainingScreen


@dataclass(frozen=True, slots=True)
class Request:
    """One training as requested. ``options`` is the recipe's own record; ``data`` a folder or file.

    ``synthetic``: the data is made there first. ``gpus``: how many ranks to start; None for this process alone.
    """

    options: Any
    settings: TrainSettings
    data: Path
    out: Path
    resume_from: Path | None = None
    fresh: bool = False
    synthetic: bool = False
    gpus: int | None = None

    def train(self, job: Job, screen: TrainingScreen | None = None) -> dict[str, float]:
        """Train the job and return the last metrics. Raises FulltiltErrors."""
        from fulltilt.train.loop import train

        job = replace(job, made_from=mask_config({"data": str(self.data), **asdict(self.options)}))
        return train(
            job, self.settings, self.out, resume_from=self.resume_from, fresh=self.fresh, screen=screen
        ).metrics


@dataclass(frozen=True, slots=True)
class Translated:
    """A config with the keys of all recipes, its problems, and the names that it uses for the keys."""

    values: Mapping[str, Any]
    problems: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A trainer that ships with Fulltilt.

    ``options`` is a frozen dataclass whose fields are made by ``option``: each is a flag and a key of the config. Its
    ``problems(settings)``, if it has that method, says what does not go together.
    ``settings`` are its defaults of TrainSettings. ``check_options`` checks the options before any data is made or
    read, ``check`` the data; they raise UsageError and DataError. ``run`` trains and returns the last metrics.
    ``synthetic`` and ``synthetic_size`` are kind and samples of ``--data synthetic``. ``translate`` converts
    the keys of another trainer's config file.
    """

    name: str
    about: str
    options: type[Any]
    check: Callable[[Request], None]
    run: Callable[[Request], Mapping[str, float]]
    synthetic: str
    synthetic_size: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    translate: Callable[[Mapping[str, Any]], Translated] = Translated
    check_options: Callable[[Request], None] = lambda _request: None


def say(*lines: str) -> None:
    """Print lines, on the first rank."""
    from fulltilt.train.distributed import rank_from_env

    if rank_from_env().rank == 0:
        print(*lines, sep="\n", flush=True)


def imported(place: str) -> Callable[[Request], Any]:
    """The function ``module:name``, imported when it is called: flags and help need no torch."""
    module, _, name = place.partition(":")

    def call(request: Request) -> Any:
        return getattr(importlib.import_module(module), name)(request)

    return call
