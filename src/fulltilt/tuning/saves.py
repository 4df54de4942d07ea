"""Inside a trial: what the job saves goes to a scratch folder, and what was there before stays (`users_files.py`).

| entry point                                        | in a trial                                                 |
|----------------------------------------------------|------------------------------------------------------------|
| torch.save, torch.jit.save, safetensors, parquet, …| written to the scratch folder (`savers.py`)                |
| torch.load, torch.jit.load, …                      | read from there what this trial has saved                  |
| save_pretrained, save_model, … of Hugging Face     | their folder is in the scratch folder                      |
| Lightning's checkpoints                            | written to the scratch folder                              |
| sqlite3, h5py.File, torch.from_file                | see `openers.py`                                           |
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

from fulltilt.tuning.openers import OPENERS, Openers
from fulltilt.tuning.savers import LOADERS, SAVERS
from fulltilt.tuning.users_files import Guard, UsersFiles

# The system's own modules, which Python imports with, and ours, which look past the guards.
LEFT_AS_THEY_ARE = ("posix", "nt", "_io", "_frozen", "importlib", "zipimport", "fulltilt")


class Saves:
    """Keeps what a trial writes away from the user's files, from ``install`` to the end of the process."""

    def __init__(self, scratch: Path, study: Path | None = None) -> None:
        self.files = UsersFiles(scratch, study)
        self._openers = Openers(self.files)
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
        originals: dict[int, tuple[Any, str]] = {}
        for home, name, guard in self.files.guards():
            originals.setdefault(id(getattr(home, name)), (home, name))
            self._exchange(home, name, guard)
        self._exchange_copies({original: getattr(*place) for original, place in originals.items()})

    def restore(self) -> None:
        """Put every original back."""
        while self._undo:
            self._undo.pop()()

    def _exchange(self, home: Any, name: str, make: Guard) -> None:
        original, is_its_own = getattr(home, name), name in vars(home)
        guarded = make(original)
        setattr(home, name, guarded if isinstance(guarded, type) else functools.wraps(original)(guarded))
        self._undo.append(lambda: setattr(home, name, original) if is_its_own else delattr(home, name))

    def _exchange_copies(self, guarded: dict[int, Any]) -> None:
        """Modules that are imported already may have a call under a name of their own, as bz2 and lzma have open."""
        for module in [each for name, each in list(sys.modules.items()) if not name.startswith(LEFT_AS_THEY_ARE)]:
            for name, original in [(name, value) for name, value in _globals(module) if id(value) in guarded]:
                setattr(module, name, guarded[id(original)])
                self._undo.append(functools.partial(setattr, module, name, original))

    def _exchange_in(self, module: Any, path: str, make: Guard) -> None:
        *outer, attribute = path.split(".")
        home = functools.reduce(lambda home, part: getattr(home, part, None), outer, module)
        if hasattr(home, attribute):
            self._exchange(home, attribute, make)

    def _guard(self, module: ModuleType) -> None:
        for guards, divert in ((SAVERS, True), (LOADERS, False)):
            for path, place, name in guards.get(module.__name__, ()):
                self._exchange_in(module, path, functools.partial(self._passing, place, name, divert))
        for path, guard in self._openers.guards(module.__name__):
            self._exchange_in(module, path, guard)
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


def _globals(module: Any) -> list[tuple[str, Any]]:
    """What a module holds; anything may have been put among the modules."""
    return list(vars(module).items()) if isinstance(module, ModuleType) else []


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
