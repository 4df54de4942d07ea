"""A process is told of an import behind its end, and imports as ever."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fulltilt.recorder.import_watcher import ImportWatcher


def test_the_call_comes_behind_the_import_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waited_for.py").write_text("done = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[ModuleType] = []
    watcher = ImportWatcher({"waited_for": seen.append})
    sys.meta_path.insert(0, watcher)
    try:
        assert importlib.util.find_spec("waited_for") is not None  # only asked for
        assert not seen
        module = importlib.import_module("waited_for")
        assert [one.done for one in seen] == [module.done]
        assert watcher not in sys.meta_path
    finally:
        sys.modules.pop("waited_for", None)
        if watcher in sys.meta_path:
            sys.meta_path.remove(watcher)
