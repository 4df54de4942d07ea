"""The settings file of a study finds its loader again, also one that does not look like a training loader."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import zeros
from torch.utils.data import DataLoader, TensorDataset

from fulltilt import store
from fulltilt.cli.run import settings_not_in_force
from fulltilt.errors import UsageError
from fulltilt.recorder.hooks import Patches
from fulltilt.recorder.hooks.dataloader import override_fastai
from fulltilt.recorder.import_watcher import ImportWatcher
from fulltilt.recorder.loaders.settings_file import LoaderOverride, read_loader, read_settings
from fulltilt.records import Settings
from fulltilt.tuning.live.measurement import Knobs
from tests.tuning.live_jobs import Squares, tuning


def changed(override: LoaderOverride, **given: Any) -> dict[str, Any]:
    loader = object.__new__(DataLoader)
    return override(DataLoader.__init__, loader, (TensorDataset(zeros(4, 1)),), given)[1]


def test_a_loader_is_known_by_its_line_or_by_its_looks() -> None:
    by_looks = LoaderOverride(Settings(num_workers=3))
    assert changed(by_looks, shuffle=True)["num_workers"] == 3
    assert "num_workers" not in changed(by_looks)
    # The line that calls the override in these tests: two lines below `def changed`.
    line = changed.__code__.co_firstlineno + 2
    here = LoaderOverride(Settings(num_workers=3), f"{Path(__file__).relative_to(Path.cwd())}:{line}")
    assert changed(here)["num_workers"] == 3


FASTAI = """
class _FakeLoader:
    def __init__(self, d, pin_memory, num_workers):
        self.num_workers, self.pin_memory = num_workers, pin_memory
"""


def test_fastais_loaders_that_shuffle_take_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are none of torch's: trials of other workers all measured the same, and nothing could be tuned."""
    (tmp_path / "fastai" / "data").mkdir(parents=True)
    (tmp_path / "fastai" / "data" / "load.py").write_text(FASTAI)
    monkeypatch.syspath_prepend(str(tmp_path))
    others = [finder for finder in sys.meta_path if not isinstance(finder, ImportWatcher)]
    monkeypatch.setattr(sys, "meta_path", others)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastai"]:
        monkeypatch.delitem(sys.modules, name)
    patches = Patches()
    override_fastai(patches, Settings(num_workers=3))
    made = importlib.import_module("fastai.data.load")._FakeLoader
    shuffled, in_order = (made(SimpleNamespace(shuffle=shuffle), False, num_workers=0) for shuffle in (True, False))
    assert (shuffled.num_workers, shuffled.pin_memory, in_order.num_workers) == (3, False, 0)
    patches.restore()
    assert made(SimpleNamespace(shuffle=True), False, num_workers=0).num_workers == 0
    for name in ("fastai", "fastai.data", "fastai.data.load"):
        del sys.modules[name]


def test_the_file_names_its_loader_and_still_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"num_workers": 3, "loader": "train.py:7"}))
    assert read_settings(path) == Settings(num_workers=3)
    assert read_loader(path) == "train.py:7"
    path.write_text(json.dumps({"num_workers": 3, "loaders": "train.py:7"}))
    with pytest.raises(UsageError, match="unknown keys: loaders"):
        read_settings(path)


@pytest.mark.parametrize(
    ("name", "value"), [("num_workers", -1), ("num_workers", 100_000), ("prefetch_factor", 0), ("torch_threads", 10**9)]
)
def test_numbers_that_no_machine_can_use_are_refused(tmp_path: Path, name: str, value: int) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({name: value}))
    with pytest.raises(UsageError, match=rf"{name} should be from \d to 1024, not {value}"):
        read_settings(path)


def test_live_tuning_names_its_loader_too(tmp_path: Path) -> None:
    with tuning(tmp_path, [Knobs(1)], [True]) as one:
        loader = one.trains(DataLoader(Squares(40), batch_size=2))
        deadline_s = time.monotonic() + 60
        while not (tmp_path / store.SETTINGS_FILE).exists() and time.monotonic() < deadline_s:
            for _ in loader:
                time.sleep(0.001)
        path = tmp_path / store.SETTINGS_FILE
        assert read_settings(path).num_workers == 1
        assert read_loader(path) == one.session.loaders.of(loader).where


def test_settings_that_met_no_loader_are_told() -> None:
    settings = {"asked.num_workers": 4, "num_workers": 0, "loader": "train.py:8"}
    assert '"loader": "train.py:8"' in str(settings_not_in_force(settings))
    assert settings_not_in_force({**settings, "num_workers": 4}) is None
    assert settings_not_in_force({**settings, "live": "settled"}) is None
    assert settings_not_in_force({"num_workers": 0}) is None
