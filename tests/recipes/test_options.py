"""Flags and config files of recipes: what wins, what is refused, and what a user reads."""

from __future__ import annotations

import os
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from fulltilt import recipes
from fulltilt.cli import main as command
from fulltilt.errors import DataError, UsageError
from fulltilt.recipes import options
from fulltilt.recipes.recipe import Recipe, Request
from fulltilt.train.config import option
from fulltilt.train.stop import BEGAN


@dataclass(frozen=True, slots=True)
class Own:
    colour: Literal["red", "green"] = option("red", "The colour.")
    legs: int = option(4, "How many legs.", least=1)


def recipe(**changes: object) -> Recipe:
    return Recipe(
        name="cod",
        about="A recipe for tests.",
        options=Own,
        check=changes.get("check", lambda request: None),  # type: ignore[arg-type]
        run=changes.get("run", lambda request: {}),  # type: ignore[arg-type]
        synthetic="cod",
        synthetic_size=8,
        settings={"epochs": 7, "monitor": "iou"},
    )


def test_flags_win_over_the_file_and_the_file_over_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("epochs: 9\nlr: 2e-5\nlegs: 6\nmax_time: 11h\ndata: elsewhere\nclip_norm: 1.0\n")
    asked = options.read(recipe(), {"lr": 0.5, "colour": "green"}, file)
    assert (asked.settings.epochs, asked.settings.lr, asked.settings.monitor) == (9, 0.5, "iou")
    assert (asked.settings.max_time_s, asked.settings.clip_norm) == (11 * 3600, 1.0)
    assert (asked.options, asked.data) == (Own("green", 6), Path("elsewhere"))
    assert options.read(recipe(), {}).settings.epochs == 7


def test_every_problem_is_told_at_once_with_what_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("epoch: 9\ncolour: gren\nlegs: 0\nresume_form: x\nlr: 0.001\nmin_lr: 0.1\n")
    with pytest.raises(UsageError) as refused:
        options.read(recipe(), {}, file)
    told = str(refused.value).splitlines()
    assert told[0].startswith("4 problems in ")
    assert any("did you mean epochs?" in line for line in told)
    assert any("did you mean green?" in line for line in told)
    assert any("legs: should be at least 1" in line for line in told)
    assert any("did you mean resume_from?" in line for line in told)


def test_a_problem_between_settings_is_found(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="min_lr"):
        options.read(recipe(), {"lr": 1e-5, "min_lr": 1e-3})


def test_an_unknown_recipe_is_answered_with_a_guess() -> None:
    with pytest.raises(UsageError, match="did you mean carclip"):
        recipes.find("car-clip")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """``fulltilt train cod`` is a recipe that only notes what it was asked for."""
    seen: list[Request] = []
    module = types.ModuleType("fulltilt.recipes.cod")
    module.RECIPE = recipe(run=lambda request: seen.append(request) or {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fulltilt.recipes.cod", module)
    return seen


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        command.main(["train", *arguments])
    return int(ended.value.code or 0)


def test_a_repeated_flag_takes_the_last(installed: list[Request], tmp_path: Path) -> None:
    code = run("cod", "--workers", "4", "--out", str(tmp_path), "--data", "d", "--workers", "12", "--no-compile")
    assert code == 0
    assert (installed[0].settings.workers, installed[0].data, installed[0].out) == (12, Path("d"), tmp_path)


def test_a_time_limit_counts_from_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not from the first step: what comes before it, such as making the data, takes time as well."""
    began: list[float] = []
    module = types.ModuleType("fulltilt.recipes.cod")
    module.RECIPE = recipe(run=lambda request: began.append(float(os.environ[BEGAN])) or {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fulltilt.recipes.cod", module)
    before = time.monotonic()
    assert run("cod", "--out", str(tmp_path), "--data", "d") == 0
    assert before <= began[0] <= time.monotonic()
    assert BEGAN not in os.environ


def test_help_shows_shared_and_own_flags(installed: list[Request], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cod", "--help") == 0
    shown = capsys.readouterr().out
    wanted = (
        *("--config", "--data", "--out", "--epochs", "--max-steps", "--batch-size", "--accumulation", "--lr"),
        *("--workers", "--seed", "--device", "--gpus", "--precision", "--compile", "--no-compile", "--resume-from"),
        *("--fresh", "--max-time", "--save-every", "--residency", "--min-lr", "--schedule", "--warmup-epochs"),
        *("--colour", "--legs"),
    )
    assert [flag for flag in wanted if flag not in shown] == []
    assert not installed


@pytest.mark.parametrize(
    "arguments", [["--epoch", "3"], ["--epochs", "x"], ["--colour", "blue"], ["--max-time", "soon"], ["--out", ""]]
)
def test_bad_usage_ends_with_2_before_anything_runs(
    arguments: list[str], installed: list[Request], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("cod", "--out", str(tmp_path / "o"), "--data", "d", *arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("fulltilt: ")
    assert len(shown.err.splitlines()) <= 3
    assert not installed
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("out", "code"), [("file", 2), ("file/below", 7)])
def test_a_place_that_cannot_be_written_is_told(
    out: str, code: int, installed: list[Request], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("cod", "--out", str(tmp_path / out), "--data", "d") == code
    assert str(tmp_path / out) in capsys.readouterr().err
    assert not installed


def test_bad_data_ends_with_4_and_the_traceback_goes_to_a_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(request: Request) -> None:
        raise DataError(f"{request.data} has no masks", "Give the folder that holds Train and Test.")

    module = types.ModuleType("fulltilt.recipes.cod")
    module.RECIPE = recipe(check=refuse)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fulltilt.recipes.cod", module)
    assert run("cod", "--out", str(tmp_path), "--data", "nowhere") == 4
    assert capsys.readouterr().err.splitlines() == [
        "fulltilt: nowhere has no masks",
        "  Give the folder that holds Train and Test.",
    ]
    assert "Traceback" in (tmp_path / "error.log").read_text()
    assert run("cod", "--out", str(tmp_path / "new"), "--data", "nowhere") == 4
    assert not (tmp_path / "new").exists(), "what was refused before it began left a folder behind"
