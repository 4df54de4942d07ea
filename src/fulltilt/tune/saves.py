"""Inside a trial: what the job saves goes to a scratch folder, and what was there before stays (`users_files.py`).

| entry point                                        | in a trial                                                 |
|----------------------------------------------------|------------------------------------------------------------|
| torch.save, torch.jit.save, safetensors, parquet, …| written to the scratch folder (`savers.py`)                |
| torch.load, torch.jit.load, …                      | read from there what this trial has saved                  |
| save_pretrained, save_model, … of Hugging Face     | their folder is in the scratch folder                      |
| Lightning's checkpoints                            | written to the scratch folder                              |
| sqlite3.connect, h5py.File of what was there before| opens a copy in the scratch folder, the file stays         |
| sqlite3.connect, h5py.File of a new file, training | made in the scratch folder                                 |
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from fulltilt.tune.savers import LOADERS, OPENERS, SAVERS
from fulltilt.tune.users_files import Guard, UsersFiles


class Saves:
    """Keeps what a trial writes away from the user's files, from ``install`` to the end of the process."""

    def __init__(self, scratch: Path, study: Path | None = None) -> None:
        self.files = UsersFiles(scratch, study)
        self.saved = 0  # checkpoints, which take a moment; a line in a log does not
        self._undo: list[Callable[[], None]] = []

    @property
    def diverted(self) -> int:
        """How many writes went to the scratch folder."""
        return self.files.diverted

    # ------------------------------------------------------------------ in place and out again

    def install(self) -> None:
        """Put the guards in place: in what is imported already, and in what will be."""
        if self._undo:
            return
        names = {*SAVERS, *LOADERS, *OPENERS}
        for name in names & set(sys.modules):
            self._guard(sys.modules[name])
        finder = _SaversFinder(names - set(sys.modules), self._guard)
        sys.meta_path.insert(0, finder)
        self._undo.append(lambda: sys.meta_path.remove(finder))
        for home, name, guard in self.files.guards():
            self._exchange(home, name, guard)

    def restore(self) -> None:
        """Put every original back."""
        while self._undo:
            self._undo.pop()()

    def _exchange(self, home: Any, name: str, make: Guard) -> None:
        original = getattr(home, name)
        setattr(home, name, functools.wraps(original)(make(original)))
        self._undo.append(lambda: setattr(home, name, original))

    def _exchange_in(self, module: Any, path: str, make: Guard) -> None:
        *outer, attribute = path.split(".")
        home = functools.reduce(lambda home, part: getattr(home, part, None), outer, module)
        if hasattr(home, attribute):
            self._exchange(home, attribute, make)

    def _guard(self, module: ModuleType) -> None:
        for guards, divert in ((SAVERS, True), (LOADERS, False)):
            for path, place, name in guards.get(module.__name__, ()):
                self._exchange_in(module, path, functools.partial(self._passing, place, name, divert))
        for path, place, name, mode in OPENERS.get(module.__name__, ()):
            self._exchange_in(module, path, functools.partial(self._opening_elsewhere, place, name, mode))
        if module.__name__ == "transformers.trainer" and hasattr(module.Trainer, "_save_checkpoint"):
            self._exchange(module.Trainer, "_save_checkpoint", self._checkpointing)

    # ------------------------------------------------------------------ the guards

    def _passing(self, place: int, name: str, divert: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        """A call with a path among its arguments: a saver's goes aside, a loader finds there what was saved."""

        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get(name, args[place] if len(args) > place else None)
            if not self.files.is_path(given):
                return original(*args, **kwargs)
            aside = self.files.aside(given)
            if divert:
                aside.parent.mkdir(parents=True, exist_ok=True)
                self.files.diverted += 1
                self.saved += 1
            elif not aside.exists():
                return original(*args, **kwargs)
            if name in kwargs:
                return original(*args, **{**kwargs, name: str(aside)})
            return original(*args[:place], str(aside), *args[place + 1 :], **kwargs)

        return call

    def _checkpointing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hugging Face's checkpoints: their folder is an attribute of the trainer's arguments."""

        def _save_checkpoint(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            folder = trainer.args.output_dir
            if not self.files.is_path(folder):
                return original(trainer, *args, **kwargs)
            aside = self.files.aside(folder)
            aside.mkdir(parents=True, exist_ok=True)
            self.files.diverted += 1
            self.saved += 1
            trainer.args.output_dir = str(aside)
            try:
                return original(trainer, *args, **kwargs)
            finally:
                trainer.args.output_dir = folder

        return _save_checkpoint

    def _opening_elsewhere(
        self, place: int, name: str, mode_place: int | None, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        def opened(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get(name, args[place] if len(args) > place else None)
            if not self.files.is_path(given) or str(given).startswith((":memory:", "file:")):
                return original(*args, **kwargs)
            mode = "a"
            if mode_place is not None:
                mode = kwargs.get("mode") or (args[mode_place] if len(args) > mode_place else None) or "r"
            if mode == "r":
                path = self.files.aside(given) if self.files.aside(given).is_file() else given
            else:
                path = self.files.copy_to_write(given, starts_empty=mode == "w")
                if path is given and self.files.would_be_taken_away(given):
                    # sqlite makes its file later, with others beside it: what is made aside goes with all of them.
                    path = self.files.aside(given)
                    path.parent.mkdir(parents=True, exist_ok=True)
            if name in kwargs:
                return original(*args, **{**kwargs, name: path})
            return original(*args[:place], path, *args[place + 1 :], **kwargs)

        return opened


class _SaversFinder(importlib.abc.MetaPathFinder):
    """Calls back when one of the named modules has been imported."""

    def __init__(self, names: set[str], imported: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._imported = imported

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with a call behind the end of its execution."""
        if name not in self._names:
            return None
        # Only those behind this one: a finder before it that asks the others too would ask back for ever.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            if (spec := finder.find_spec(name, path, target)) is not None:
                self._call_back_after(spec)
                return spec
        return None

    def _call_back_after(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._imported(module)

        loader.exec_module = exec_module
