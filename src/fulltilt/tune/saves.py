"""Inside a trial: nothing of the user's is overwritten or deleted, and what the job saves goes to a scratch folder.

| entry point                                        | in a trial                                                 |
|----------------------------------------------------|------------------------------------------------------------|
| torch.save, safetensors' save_file                 | written to the scratch folder                              |
| torch.load, safetensors' load_file                 | read from there what this trial has saved                  |
| save_pretrained, save_model, … of Hugging Face     | their folder is in the scratch folder                      |
| Lightning's checkpoints                            | written to the scratch folder                              |
| open for writing a file that was there before      | opens a copy in the scratch folder, the file stays         |
| os.remove, rename, … of what was there before      | does nothing                                               |

Other new files are written where the job wants them, and reported: a job may need them.
"""

from __future__ import annotations

import builtins
import functools
import importlib.abc
import importlib.machinery
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# Copying a larger file to append to it would take longer than the trial.
LARGEST_COPY_BYTES = 256 << 20
MOST_NAMES = 20

# Where libraries save: the module, the attribute, and the place of the path among the arguments (self counted).
SAVERS = {
    "torch": (("save", 1, "f"),),
    "safetensors.torch": (("save_file", 1, "filename"), ("save_model", 1, "filename")),
    "safetensors.numpy": (("save_file", 1, "filename"),),
    "transformers.modeling_utils": (("PreTrainedModel.save_pretrained", 1, "save_directory"),),
    "transformers.tokenization_utils_base": (("PreTrainedTokenizerBase.save_pretrained", 1, "save_directory"),),
    "transformers.configuration_utils": (
        ("PretrainedConfig.save_pretrained", 1, "save_directory"),
        ("PreTrainedConfig.save_pretrained", 1, "save_directory"),
    ),
    "transformers.trainer": (("Trainer.save_model", 1, "output_dir"),),
    "accelerate.accelerator": (
        ("Accelerator.save_state", 1, "output_dir"),
        ("Accelerator.save_model", 2, "save_directory"),
    ),
    "lightning.fabric.utilities.cloud_io": (("_atomic_save", 1, "filepath"),),
    "lightning.fabric.plugins.io.torch_io": (("_atomic_save", 1, "filepath"),),
    "pytorch_lightning.plugins.io.torch_plugin": (("_atomic_save", 1, "filepath"),),
}
LOADERS = {
    "torch": (("load", 0, "f"),),
    "safetensors.torch": (("load_file", 0, "filename"),),
}


class Saves:
    """Keeps what a trial writes away from the user's files, from ``install`` to the end of the process."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._began = _now_on_disk(scratch)
        self._free = tuple(f"{place}{os.sep}" for place in (scratch.absolute(), "/dev", "/proc", "/sys"))
        self.diverted = 0
        self.kept: list[str] = []
        self._undo: list[Callable[[], None]] = []

    # ------------------------------------------------------------------ in place and out again

    def install(self) -> None:
        """Put the guards in place: in what is imported already, and in what will be."""
        for name in (*SAVERS, *LOADERS):
            if name in sys.modules:
                self._guard(sys.modules[name])
        finder = _SaversFinder({*SAVERS, *LOADERS} - set(sys.modules), self._guard)
        sys.meta_path.insert(0, finder)
        self._undo.append(lambda: sys.meta_path.remove(finder))
        self._exchange(builtins, "open", self._opening)
        self._exchange(io, "open", self._opening)
        for name in ("remove", "unlink", "rmdir", "truncate"):
            self._exchange(os, name, self._keeping)
        for name in ("rename", "replace"):
            self._exchange(os, name, self._moving)
        self._exchange(shutil, "rmtree", self._keeping)

    def restore(self) -> None:
        """Put every original back."""
        while self._undo:
            self._undo.pop()()

    def _exchange(self, home: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(home, name)
        setattr(home, name, functools.wraps(original)(make(original)))
        self._undo.append(lambda: setattr(home, name, original))

    def _guard(self, module: ModuleType) -> None:
        for guards, divert in ((SAVERS, True), (LOADERS, False)):
            for path, place, name in guards.get(module.__name__, ()):
                home: Any = module
                *outer, attribute = path.split(".")
                for part in outer:
                    home = getattr(home, part, None)
                if hasattr(home, attribute):
                    self._exchange(home, attribute, functools.partial(self._passing, place, name, divert))
        if module.__name__ == "transformers.trainer" and hasattr(module.Trainer, "_save_checkpoint"):
            self._exchange(module.Trainer, "_save_checkpoint", self._checkpointing)

    # ------------------------------------------------------------------ where things go

    def aside(self, path: Any) -> Path:
        """Where in the scratch folder a path of the user's is written instead."""
        absolute = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - the path need not exist, nor be resolved
        return self._scratch / absolute.replace(":", "").lstrip("/\\")

    def _is_path(self, value: Any) -> bool:
        return isinstance(value, str | bytes | os.PathLike) and not self._is_free(value)

    def _is_free(self, path: Any) -> bool:
        """Whether this is a place of nobody's: the scratch folder itself, devices."""
        absolute = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        return absolute.startswith(self._free)

    def _was_there(self, path: Any) -> bool:
        """Whether a path is the user's: it exists and was not changed since this trial began."""
        if not self._is_path(path):
            return False
        try:
            return Path(os.fsdecode(path)).stat().st_ctime < self._began
        except (OSError, ValueError):
            return False

    def _keep(self, path: Any) -> None:
        name = os.fsdecode(path)
        if name not in self.kept and len(self.kept) < MOST_NAMES:
            self.kept.append(name)

    # ------------------------------------------------------------------ the guards

    def _passing(self, place: int, name: str, divert: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        """A call with a path among its arguments: a saver's goes aside, a loader finds there what was saved."""

        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get(name, args[place] if len(args) > place else None)
            if not self._is_path(given):
                return original(*args, **kwargs)
            aside = self.aside(given)
            if divert:
                aside.parent.mkdir(parents=True, exist_ok=True)
                self.diverted += 1
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
            if not self._is_path(folder):
                return original(trainer, *args, **kwargs)
            aside = self.aside(folder)
            aside.mkdir(parents=True, exist_ok=True)
            self.diverted += 1
            trainer.args.output_dir = str(aside)
            try:
                return original(trainer, *args, **kwargs)
            finally:
                trainer.args.output_dir = folder

        return _save_checkpoint

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not self._is_path(file):
                return original(file, mode, *args, **kwargs)
            aside = self.aside(file)
            if not set(mode) & set("wa+x"):
                return original(aside if aside.is_file() else file, mode, *args, **kwargs)
            if self._was_there(file) and "x" not in mode and os.path.isfile(file):  # noqa: PTH113
                starts_empty = "w" in mode
                if not starts_empty and os.path.getsize(file) > LARGEST_COPY_BYTES:  # noqa: PTH202
                    return original(file, mode, *args, **kwargs)
                aside.parent.mkdir(parents=True, exist_ok=True)
                if not starts_empty and not aside.exists():
                    shutil.copyfile(file, aside)
                self.diverted += 1
                return original(aside, mode, *args, **kwargs)
            return original(file, mode, *args, **kwargs)

        return opened

    def _keeping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def keep(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._was_there(path):
                return original(path, *args, **kwargs)
            self._keep(path)
            return None

        return keep

    def _moving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_path(source) and self.aside(source).exists():
                # Saved by this trial, as in "write a temporary file, then rename it over the checkpoint".
                moved = self.aside(target)
                moved.parent.mkdir(parents=True, exist_ok=True)
                return original(self.aside(source), moved, *args, **kwargs)
            for path in (source, target):
                if self._was_there(path):
                    self._keep(path)
                    return None
            return original(source, target, *args, **kwargs)

        return move


def _now_on_disk(folder: Path) -> float:
    """The present moment on the clock that stamps files, which may be another machine's."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_ctime


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
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
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
