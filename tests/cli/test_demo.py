"""`fulltilt demo`: which verbs it shows, in which order, and when it stops."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from fulltilt.cli import demo
from fulltilt.cli.main import main


class Verbs:
    """Stands for the processes that the demo starts, which end with these codes."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.seen: list[list[str]] = []

    def __call__(self, command: list[str]) -> Any:
        self.seen.append(command[3:])
        return self

    def wait(self) -> int:
        return self.codes.pop(0)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    folders: list[Path] = []
    monkeypatch.setattr(demo, "_train", folders.append)
    return folders


def run_demo(out: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--out", str(out)])
    return int(ended.value.code or 0)


def test_it_explains_tunes_compares_and_trains(
    tmp_path: Path, trained: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verbs = Verbs(0, 0, 0)
    monkeypatch.setattr(subprocess, "Popen", verbs)
    assert run_demo(tmp_path) == 0
    plain, tuned, script = (str(tmp_path / name) for name in ("1-starved", "2-tuned", "train.py"))
    assert verbs.seen == [
        ["run", "--out", plain, script],
        ["run", "--auto", "--out", tuned, script, "--epochs", str(demo.TUNED_EPOCHS)],
        ["report", "--no-page", plain, tuned],
    ]
    assert trained == [tmp_path / "3-trained"]
    assert f"$ fulltilt run --auto --out {tuned} {script}" in capsys.readouterr().out
    assert "fulltilt" not in {line.split()[1] for line in Path(script).read_text().splitlines() if "import" in line}


def test_it_ends_with_the_verb_that_failed(
    tmp_path: Path, trained: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    verbs = Verbs(0, -2)
    monkeypatch.setattr(subprocess, "Popen", verbs)
    assert run_demo(tmp_path) == 130
    assert len(verbs.seen) == 2
    assert not trained


def test_a_place_that_cannot_be_written(tmp_path: Path, trained: list[Path], capsys: Any) -> None:
    (tmp_path / "file").write_text("mine")
    assert run_demo(tmp_path / "file") == 7
    assert "Choose another place with --out DIR." in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
