"""A process is told of an import behind its end, and imports as ever."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fulltilt.recorder.import_watcher import ImportWatcher


@pytest.mark.parametrize("number", [1, 2])
def test_the_call_comes_behind_the_import_and_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waited_for.py").write_text("done = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[ModuleType] = []
    watchers = [ImportWatcher({"waited_for": seen.append}) for _ in range(number)]
    monkeypatch.setattr(sys, "meta_path", [*watchers, *sys.meta_path])
    assert importlib.util.find_spec("waited_for") is not None  # only asked for
    assert not seen
    module = importlib.import_module("waited_for")
    del sys.modules["waited_for"]
    assert seen == [module] * number
    assert not [finder for finder in sys.meta_path if finder in watchers]
