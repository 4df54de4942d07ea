"""`%load_ext fulltilt` and its magics, and the notebooks in examples/."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fulltilt
from fulltilt.errors import UsageError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


class Shell:
    """What the magics use of IPython's shell."""

    execution_count = 3

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.error: BaseException | None = None

    def register_magic_function(self, function: Any, magic_kind: str, magic_name: str) -> None:
        assert (magic_kind, magic_name) == ("line_cell", "fulltilt")
        self.magic = function

    def run_cell(self, cell: str) -> Any:
        self.ran.append(cell)
        return SimpleNamespace(error_in_exec=self.error, error_before_exec=None)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    monkeypatch.chdir(tmp_path)
    shell = Shell()
    fulltilt.load_ipython_extension(shell)
    return shell


def test_a_cell_is_run_and_recorded(shell: Shell, tmp_path: Path) -> None:
    shell.magic("--out a", "x = 1")
    assert shell.ran == ["x = 1"]
    assert fulltilt.load(tmp_path / "a").run.state == "done"


def test_a_cell_that_fails_is_a_crashed_run(shell: Shell, tmp_path: Path) -> None:
    shell.error = ValueError("no")
    shell.magic("--out a", "x = 1")
    assert fulltilt.load(tmp_path / "a").run.state == "crashed"


def test_a_cell_that_is_run_again_ends_the_recording_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save = torch.save
    for _ in range(2):
        recording = fulltilt.record(tmp_path / "a").start()  # the first time the cell fails before its stop()
    recording.stop()
    assert torch.save is save
    assert fulltilt.load(tmp_path / "a").run.state == fulltilt.load(tmp_path / "a/before-1").run.state == "done"
    assert "a held a run already; it is now in" in capfd.readouterr().err


def test_a_rank_that_the_script_starts_blames_no_earlier_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the script")
    for _ in range(2):
        fulltilt.record(tmp_path).start().stop()
    assert "maybe another rank's of this job; it is now in" in capfd.readouterr().err


def test_without_a_folder_each_cell_has_its_own(shell: Shell, tmp_path: Path) -> None:
    shell.magic("", "x = 1")
    assert [path.name[-7:] for path in (tmp_path / "fulltilt-runs").iterdir()] == ["-cell-3"]
    shell.magic("")  # shows it again


@pytest.mark.parametrize(("line", "cell"), [("--what", "x = 1"), ("a b", None), ("", None)])
def test_a_mistake_in_the_line_is_told(shell: Shell, line: str, cell: str | None) -> None:
    with pytest.raises(UsageError):
        shell.magic(line, cell)
    assert not shell.ran


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in book.cells for output in cell.get("outputs", [])]
    pages = [output for output in shown if "iframe" in output.get("data", {}).get("text/html", "")]
    assert pages
    assert "input_serial" in str(pages)
