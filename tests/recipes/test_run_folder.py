"""What a training may write in its folder, and what of the last run it takes over."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fulltilt.cli import train as cli
from fulltilt.cli.main import main
from fulltilt.errors import ForeignFiles
from fulltilt.recipes import RECIPES, find, options, run_folder
from fulltilt.train.config import TrainSettings


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
    folder = run_folder.claim(tmp_path / "out")
    for content in ("", "[]", '{"workers": -1}', '{"workers": "many"}', "\x00", '{"lr": 3.0}'):
        folder.write(run_folder.LOADING_FILE, content.encode())
        assert run_folder.loading_of_last_run(folder.path) == {}
    assert run_folder.loading_of_last_run(tmp_path / "nowhere") == {}
    (tmp_path / run_folder.LOADING_FILE).write_text('{"workers": 3}')
    assert run_folder.loading_of_last_run(tmp_path) == {}, "somebody else's file was read"


def test_a_batch_size_is_never_taken_over(tmp_path: Path) -> None:
    folder = run_folder.claim(tmp_path / "out")
    folder.write(run_folder.LOADING_FILE, b'{"workers": 3, "batch_size": 99}')
    asked = options.read(find("hdf5"), {"out": str(folder.path)})
    assert asked.settings.workers == 3
    assert asked.settings.batch_size != 99


# --------------------------------------------------------------------------- what is not ours


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("fresh", [False, True])
def test_foreign_out_is_refused_and_left_as_it_is(
    name: str, fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen to fail: model and tokenizer in --out were deleted, report.html and metrics.csv replaced."""
    theirs = ["model/config.json", "model.new/a", "tokenizer/tokenizer.json", "report.html", "metrics.csv"]
    for path in theirs:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("mine")
    monkeypatch.chdir(tmp_path)
    flags = ["--data", "synthetic", "--out", ".", *(["--fresh"] if fresh else [])]
    with pytest.raises(SystemExit) as ended:
        main(["train", name, *flags])
    assert ended.value.code == 2
    assert "holds files that Fulltilt did not write: metrics.csv, model, model.new" in capsys.readouterr().err
    found = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert found == sorted(tmp_path / path for path in theirs)
    assert {path.read_text() for path in found} == {"mine"}


def test_library_folder_replaces_only_what_is_ours(tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    for text in ("first", "second"):
        with run_folder.written_by_library(target) as private:
            (private / "inner").mkdir()
            (private / "inner" / "weights").write_text(text)
    assert (target / "inner" / "weights").read_text() == "second"
    with pytest.raises(FileNotFoundError), run_folder.written_by_library(target) as private:
        (private / "half").write_bytes((private / "missing").read_bytes())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".fulltilt", "model"]
    (target / "inner" / "notes.txt").write_text("mine")
    with pytest.raises(ForeignFiles, match=r"notes\.txt"), run_folder.written_by_library(target):
        pytest.fail("it was begun")
    assert sorted(path.name for path in (target / "inner").iterdir()) == ["notes.txt", "weights"]


def test_library_folder_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    folder = run_folder.claim(target.parent)
    killed = folder.make(folder.temporary(target))
    (killed / "half").write_text("x")
    with run_folder.written_by_library(target) as private:
        (private / "weights").write_text("whole")
    assert sorted(path.name for path in target.parent.iterdir()) == [".fulltilt", "model"]


@pytest.mark.parametrize(("name", "flag"), [("visobert", "model"), ("carclip", "model")])
def test_model_given_is_never_the_one_replaced(
    name: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder.claim(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "clip"}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", name, "--data", "synthetic", f"--{flag}", "./model", "--out", "."])
    assert ended.value.code == 2
    assert "is where this run would put its own model" in capsys.readouterr().err
    assert (tmp_path / "model" / "config.json").read_text() == '{"model_type": "clip"}'


# --------------------------------------------------------------------------- what is not installed


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("cod", "train,recipes"),
        ("carclip", "train,recipes"),
        ("visobert", "train,recipes"),
        ("hdf5", "train,recipes,hdf5"),
    ],
)
@pytest.mark.slow
def test_missing_extra_is_named_with_its_install_line(name: str, extras: str, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('safetensors', 'numpy', 'PIL', 'timm', 'transformers', 'accelerate', 'h5py', 'yaml'):\n"
        "    sys.modules[name] = None\n"
        "from fulltilt.cli.main import main\n"
        f"main(['train', {name!r}, *sys.argv[1:]])"
    )
    helped, ran = (
        subprocess.run(
            [sys.executable, "-c", script, *flags], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for flags in (["--help"], [])
    )
    assert (helped.returncode, ran.returncode) == (0, 2), helped.stderr + ran.stderr
    assert "Traceback" not in ran.stderr
    assert f'Install: pip install "fulltilt[{extras}]"' in ran.stderr
    assert list(tmp_path.iterdir()) == []
