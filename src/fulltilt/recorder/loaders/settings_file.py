"""Settings of a file applied to the job's training loaders as they are constructed (`fulltilt run --settings FILE`).

Only settings that leave what is trained unchanged are applied. The user's batch size is never touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.errors import RunFolderError, UsageError
from fulltilt.recorder.loaders.call_sites import call_sites, named_arguments
from fulltilt.records import MOST_OF_A_SETTING, Settings

SAME_MATH = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "torch_threads", "start_method")

# The key for the line (file:line) of the loader that the settings are for. `fulltilt tune` writes it.
LOADER = "loader"


def read_loader(path: Path) -> str | None:
    """The line of the loader that a settings file is for; None when it names none."""
    where = store.read_json(path, follow=True).get(LOADER)
    return where if isinstance(where, str) else None


def read_settings(path: Path) -> Settings:
    """The settings of a JSON file. Raises UsageError for a missing or damaged file, unknown keys and forbidden ones."""
    try:
        plain = store.read_json(path, follow=True)
    except RunFolderError as error:
        raise UsageError(f"--settings: {error.what}") from error
    if not isinstance(plain, dict):
        raise UsageError(f"--settings: {path} should hold one JSON object")
    known = {field.name for field in fields(Settings)}
    unknown = sorted(set(plain) - known - {"schema_version", LOADER})
    if unknown:
        raise UsageError(
            f"--settings: {path} has unknown keys: {', '.join(unknown)}", f"Known are: {', '.join(sorted(known))}"
        )
    changing = sorted(key for key in plain if key in known and key not in SAME_MATH and plain[key] is not None)
    if changing:
        raise UsageError(
            f"--settings: {', '.join(changing)} would change what is trained; `run` only applies settings that do not",
            "Change it in the script itself.",
        )
    try:
        settings = store.decode(Settings, plain)
    except ValueError as error:
        raise UsageError(f"--settings: {path}: {error}") from error
    _check(path, settings)
    return settings


def _check(path: Path, settings: Settings) -> None:
    problems = [
        f"{name} should be from {least} to {MOST_OF_A_SETTING}, not {value}"
        for name, least in (("num_workers", 0), ("prefetch_factor", 1), ("torch_threads", 1))
        if (value := getattr(settings, name)) is not None and not least <= value <= MOST_OF_A_SETTING
    ]
    if settings.start_method not in (None, "fork", "spawn", "forkserver"):
        problems.append(f"start_method should be fork, spawn or forkserver, not {settings.start_method!r}")
    if problems:
        raise UsageError(f"--settings: {path}: {'; '.join(problems)}")


class LoaderOverride:
    """Changes the arguments of a training loader's construction."""

    def __init__(self, settings: Settings, where: str | None = None) -> None:
        self._settings = settings
        self._where = where

    def __call__(
        self, original: Callable[..., None], loader: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the settings in force, or as they were for a loader that does not train."""
        given = named_arguments(original, args, kwargs)
        if given is None or not self.is_for(loader, given):
            return args, kwargs
        changed = self.changed(given)
        try:
            inspect.signature(original).bind(loader, **changed)
        except TypeError:  # a derived class that does not take all of them: torch's constructor, which it calls, does
            return args, kwargs
        return (), changed

    def is_for(self, loader: Any, given: dict[str, Any]) -> bool:
        """Whether the settings are for this loader, which is under construction."""
        return (self._where is not None and call_sites(loader).where == self._where) or looks_like_training(given)

    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        """A loader's arguments with the settings in force, keeping to what DataLoader allows together."""
        changed = dict(given)
        for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers"):
            value = getattr(self._settings, name)
            if value is not None:
                changed[name] = value
        if self._settings.start_method is not None:
            changed["multiprocessing_context"] = self._settings.start_method
        if not changed.get("num_workers"):
            for needs_workers in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
                changed.pop(needs_workers, None)
        return changed


def looks_like_training(given: dict[str, Any]) -> bool:
    """Whether a loader looks like a training loader: it shuffles, or has a sampler of its own."""
    dataset = given.get("dataset")
    streams = any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)
    # Whether a sampler is true would be its length, which the user's code would be asked for.
    own = given.get("sampler") is not None or given.get("batch_sampler") is not None
    return bool(given.get("shuffle")) or own or streams
