"""`fulltilt demo`: which verbs it shows, in which order, what it prints, and when it stops."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fulltilt.cli import demo
from fulltilt.cli.main import main
from fulltilt.records import LiveRecord, Settings
from tests.report import examples

LIVE = LiveRecord(0, "settled", "", Settings(num_workers=0), Settings(num_workers=4), 20.0, 0.8, 60.0, 0.3)


class Verbs:
    """Stands for the processes that the demo starts: they end with these codes, and leave a run where one is due."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.seen: list[list[str]] = []
        self.stdout: list[str] = []

    def __call__(self, command: list[str], **_: Any) -> Any:
        self.seen.append(command[3:])
        self.stdout = [f"epoch {epoch}: 9 % right, weights abc{epoch}\n" for epoch in range(1, 4)]
        if command[3] == "run" and "--out" in command:
            run = examples.starved()[0]
            if "--auto" in command:
                rank = replace(run.ranks[0], live=(LIVE,))
                run = replace(run, ranks=(rank, *run.ranks[1:]))
            examples.write_folder(Path(command[command.index("--out") + 1]), run)
        return self

    def wait(self) -> int:
        return self.codes.pop(0)


def run_demo(out: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--out", str(out)])
    return int(ended.value.code or 0)


def test_it_explains_tunes_and_compares_in_twenty_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verbs = Verbs(0, 0, 0)
    monkeypatch.setattr(subprocess, "Popen", verbs)
    monkeypatch.chdir(tmp_path)
    assert run_demo(Path("demo")) == 0
    assert verbs.seen == [
        ["run", "--out", "demo/1-starved", "demo/train.py", "--epochs", str(demo.EPOCHS)],
        ["run", "--auto", "--out", "demo/2-tuned", "demo/train.py", "--epochs", str(demo.TUNED_EPOCHS)],
        ["report", "--html", "demo/before-after.html", "demo/1-starved", "demo/2-tuned"],
    ]
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 20
    assert "$ fulltilt run --auto --out demo/2-tuned demo/train.py" in shown
    assert "the weights after epochs 1 to 2 are the same, bit for bit" in shown
    assert "demo/before-after.html" in shown
    script = Path("demo/train.py").read_text().splitlines()
    assert "fulltilt" not in {line.split()[1] for line in script if "import" in line}


def test_it_ends_with_the_verb_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verbs = Verbs(0, -2)
    monkeypatch.setattr(subprocess, "Popen", verbs)
    assert run_demo(tmp_path / "demo") == 130
    assert len(verbs.seen) == 2
    assert "weights abc3" in capsys.readouterr().err


def test_it_writes_over_nothing_of_others(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "train.py").write_text("mine")
    assert run_demo(tmp_path) == 2
    assert run_demo(tmp_path / "train.py") == 2
    assert "Choose another folder with --out" in capsys.readouterr().err
    assert (tmp_path / "train.py").read_text() == "mine"
