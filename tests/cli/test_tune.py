"""`fulltilt tune`: what may be named, and what becomes of it before a trial is made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt.cli.main import main
from fulltilt.cli.tune import with_recipe_command


def test_a_recipe_may_be_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_recipe_command(["cod", "--lr", "1"]) == ["fulltilt", "train", "cod", "--lr", "1"]
    assert with_recipe_command(["cod.py"]) == ["cod.py"]
    (tmp_path / "cod").mkdir()  # as its data may be called
    assert with_recipe_command(["cod"]) == ["fulltilt", "train", "cod"]
    (tmp_path / "cod" / "__main__.py").write_text("")
    (tmp_path / "hdf5").write_text("import torch")
    assert (with_recipe_command(["cod"]), with_recipe_command(["hdf5"])) == (["cod"], ["hdf5"])


def test_what_a_recipe_refuses_is_told_and_its_folder_has_its_name(tmp_path: Path) -> None:
    """Also where no program called fulltilt is on the path."""
    ended = subprocess.run(
        [sys.executable, "-m", "fulltilt", "tune", "cod", "--nonsense"],
        cwd=tmp_path,
        env={**os.environ, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "No such option: --nonsense" in ended.stderr.splitlines()[-2]
    assert [path.name[16:] for path in (tmp_path / "fulltilt-runs").iterdir()] == ["tune-cod"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_polite_signal_ends_it_as_ctrl_c_does(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also before the first trial, where isolations are tried out in temporary folders."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fulltilt.cli.tune.choose", lambda _: os.kill(os.getpid(), number))
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(number, signal.SIG_DFL)  # the suite may run under nohup
    try:
        with pytest.raises(SystemExit) as ended:
            main(["tune", "train.py"])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended.value.code == 130
