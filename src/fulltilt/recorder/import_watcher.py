"""Calls back when a process has imported torch, or a library with iterables that need no DataLoader."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

# What one draw brings: one sample, a dict of columns, or a batch that is counted by its shape.
DrawUnit = Literal["sample", "columns", "batch"]
# By module: the class that training loops draw from, and its methods that begin a pass.
ITERABLES: dict[str, tuple[str, dict[str, DrawUnit]]] = {
    "torchdata.nodes.loader": ("Loader", {"__iter__": "batch"}),
    "datasets.iterable_dataset": ("IterableDataset", {"__iter__": "sample", "iter": "columns"}),
    "datasets.arrow_dataset": ("Dataset", {"iter": "columns"}),
    "ray.data.iterator": ("_IterableFromIterator", {"__iter__": "columns"}),
    "webdataset.pipeline": ("DataPipeline", {"__iter__": "batch"}),
}


def imported_iterables() -> list[ModuleType]:
    """Those of these modules that this process has imported completely."""
    modules = (sys.modules.get(name) for name in ITERABLES)
    return [one for one in modules if one is not None and not getattr(one.__spec__, "_initializing", False)]


class ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls back with each module named in ``calls`` once it is imported."""

    def __init__(self, calls: dict[str, Callable[[ModuleType], None]]) -> None:
        self._calls = calls

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the finders after this one, with a call after the module's execution."""
        if name not in self._calls:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else []
        found = (finder.find_spec(name, path, target) for finder in later)
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Not before: many libraries ask for torch's spec only to see whether it is installed.
            call = self._calls.pop(name, None)
            if not self._calls:
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)
            with contextlib.suppress(AttributeError):  # another watcher's, around this one, has done so
                del loader.exec_module
            execute(module)
            if call is not None:
                call(module)

        loader.exec_module = exec_module
        return spec
