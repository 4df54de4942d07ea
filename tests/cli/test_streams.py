"""A flag of Fulltilt's behind the script is the script's, and the user is told where it belongs."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt.cli.streams import StatusBar, tell_wrapped, warn_of_flags, wrapped
from fulltilt.report.console import NOTEBOOK_VARIABLES, PIPED_COLUMNS, open_console


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["train.py", "--auto"], ["--auto"]),
        (["train.py", "--deep=3", "--auto"], ["--auto", "--deep"]),
        (["-m", "package.train", "--deep", "3"], ["--deep"]),
        (["train.py", "--automatic", "auto", "-auto"], []),
        ([], []),
    ],
)
def test_flags_behind_the_script_are_found(
    arguments: list[str], given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_flags("run", ("--auto", "--deep"), arguments)
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == given


def test_the_script_gets_them_and_the_user_is_told(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(2)\n")
    command = [sys.executable, "-m", "fulltilt", "run", "job.py", "--auto", "--deep", "3"]
    ended = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "['--auto', '--deep', '3']\n")
    told = [line for line in ended.stderr.splitlines() if "go before it" in line]
    assert [line.split()[1] for line in told] == ["--auto", "--deep"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("name", ["", "JPY_PARENT_PID", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE", "PAGER"])
def test_no_status_line_floods_a_notebook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in (*NOTEBOOK_VARIABLES, "PAGER"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("GIT_PAGER", "cat")
    if name:
        monkeypatch.setenv(name, "cat")
    stream = Terminal()
    bar = StatusBar(stream)
    bar.show("12 steps")
    bar.close()
    assert bool(stream.getvalue()) == (name == "")


def test_a_line_for_the_terminal_hangs_below_its_beginning() -> None:
    rows = wrapped("  1. Data loading: no workers (80 %): Set num_workers=5 at train.py:45", 42)
    assert rows == ["  1. Data loading: no workers (80 %): Set", "     num_workers=5 at train.py:45"]
    assert wrapped("80 % of it waits for data", 20) == ["80 % of it waits for data"]
    assert wrapped("", 80) == [""]


def test_no_line_of_a_log_is_longer_than_its_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of 700 characters stood in the logs of jobs."""
    monkeypatch.delenv("COLUMNS", raising=False)
    said = f"fulltilt: {'a job waits for data ' * 20}".rstrip()
    tell_wrapped(said)
    open_console().print("a job waits for data " * 20)
    printed = capsys.readouterr()
    rows = printed.err.splitlines()
    assert "\n".join(rows).replace("\n  ", " ") == said  # so does bench/auto.py read it
    assert all(90 < len(row) <= PIPED_COLUMNS for row in rows[:-1])
    assert 80 < max(map(len, printed.out.splitlines())) <= PIPED_COLUMNS
    monkeypatch.setenv("COLUMNS", "60")
    tell_wrapped(said)
    assert 50 < max(map(len, capsys.readouterr().err.splitlines())) < 60
