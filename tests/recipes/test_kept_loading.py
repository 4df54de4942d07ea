"""A run goes on loading as it was told, until it is told otherwise."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fulltilt.cli import train as cli
from fulltilt.recipes import find, kept_loading, options
from fulltilt.train.settings import TrainSettings


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    """Starts a recipe that only notes its settings; returns them."""
    seen: list[TrainSettings] = []
    recipe = dataclasses.replace(
        find("hdf5"), run=lambda request: seen.append(request.settings) or {}, check=lambda request: None
    )

    def start(**flags: Any) -> TrainSettings:
        assert cli.run_recipe(recipe, {"data": str(tmp_path), "out": str(tmp_path / "out"), **flags}) == 0
        return seen[-1]

    return start


def test_what_a_study_found_holds_without_being_said_again(trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail: a resume without the flags loaded with the default number of workers, and only said so."""
    default = trained().workers
    assert trained(workers=default + 5, residency="ram").workers == default + 5
    again = trained(batch_size=7)
    assert (again.workers, again.residency, again.batch_size) == (default + 5, "ram", 7)
    assert f"Loading as this run was told before: workers {default + 5}, residency ram" in capsys.readouterr().out
    assert trained(workers=1).workers == 1, "what is said anew wins"
    assert trained().workers == 1
    assert trained(fresh=True).workers == default


def test_another_folder_or_a_damaged_file_says_nothing(tmp_path: Path) -> None:
    for content in ("", "[]", '{"workers": -1}', '{"workers": "many"}', "\x00", '{"lr": 3.0}'):
        (tmp_path / kept_loading.FILE).write_text(content)
        assert kept_loading.of_the_last_run(tmp_path) == {}
    assert kept_loading.of_the_last_run(tmp_path / "nowhere") == {}


def test_a_batch_size_is_never_taken_over(tmp_path: Path) -> None:
    (tmp_path / kept_loading.FILE).write_text('{"workers": 3, "batch_size": 99}')
    asked = options.read(find("hdf5"), {"out": str(tmp_path)})
    assert asked.settings.workers == 3
    assert asked.settings.batch_size != 99
