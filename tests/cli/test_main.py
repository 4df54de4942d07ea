"""The command itself, before any verb of it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt.cli.main import main
from tests.report import examples

# Ctrl-C as the named module is brought in.
INTERRUPTED = """
import builtins, sys
plain = builtins.__import__
def interrupted(name, *rest, **more):
    if name == {module!r}:
        raise KeyboardInterrupt
    return plain(name, *rest, **more)
builtins.__import__ = interrupted
from fulltilt.__main__ import main
sys.argv = ["fulltilt", "check"]
main()
"""


@pytest.mark.parametrize("module", ["typer", "fulltilt.probes.storage"])
def test_ctrl_c_while_it_starts_shows_no_traceback(module: str) -> None:
    script = INTERRUPTED.format(module=module)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("verb", [[], ["check"], ["run"], ["tune"], ["train"], ["train", "hdf5"]], ids=" ".join)
def test_a_short_h_asks_for_help(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as ended:
            main([*verb, flag])
        assert not ended.value.code
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0].startswith("Usage: fulltilt")


BARRED = """
import sys
for name in ("numpy", "yaml", "PIL", "timm", "transformers", "safetensors", "h5py", "accelerate"):
    sys.modules[name] = None
from fulltilt.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("command", "code", "install"),
    [
        ("train cod", 2, 'pip install "fulltilt[train,recipes]"'),
        ("train hdf5 --epochs 1", 2, 'pip install "fulltilt[train,recipes,hdf5]"'),
        ("make-data cod data", 2, 'pip install "fulltilt[recipes]"'),
        ("train cod --help", 0, ""),
        ("--help", 0, ""),
    ],
)
def test_a_missing_extra_is_named_with_its_install_line(command: str, code: int, install: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", BARRED, *command.split()]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120)
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False), ended.stderr
    assert install in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tuen", "train.py"], ["No such command 'tuen'. Did you mean 'tune'?", "Try: fulltilt --help"]),
        (["xyz"], ["No such command 'xyz'.", "Commands: run, report, tune"]),
        (["train.py", "--lr", "1"], ["train.py is a file, not a command", "fulltilt run train.py --lr 1"]),
        (["run", "trian.py"], ["trian.py does not exist; did you mean train.py?", "The working folder is"]),
        (["run", "zzz.py"], ["zzz.py does not exist", "The working folder is"]),
        (["run", "nothing"], ["nothing is neither a script nor a program", "The working folder is"]),
        (["report", "train.py"], ["train.py is not a run folder: it is a file", "fulltilt run train.py"]),
        (["report"], ["There is none in", "if you gave one:", "  fulltilt report RUN [RUN ...]"]),  # in 80 columns
        (["check", "--workers", "x"], ["'--workers': expects a whole number", "Try: fulltilt check --help"]),
        (["report", "."], [". is not a run folder: it has no run.json", "fulltilt run SCRIPT.py records one"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and len(value) < 4 else None,
)
def test_a_mistake_is_answered_with_what_to_type(
    arguments: list[str],
    told: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for script in ("train.py", "w.py"):
        (tmp_path / script).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(told)
    for line, wanted in zip(lines, told, strict=True):
        assert wanted in line


def test_runs_below_a_folder_that_is_none_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    examples.write_folder(tmp_path / "fulltilt-runs" / "a", examples.starved()[0])
    for folder in ("fulltilt-runs", "nowhere"):
        with pytest.raises(SystemExit):
            main(["report", folder])
        assert capsys.readouterr().err.endswith("There are runs in fulltilt-runs/a.\n")


@pytest.mark.parametrize("module", ["fulltilt.py", "fulltilt/__init__.py"])
def test_a_script_with_a_module_of_our_name_is_refused(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / module).parent.mkdir(exist_ok=True)
    for name in (module, "train.py"):
        (tmp_path / name).touch()
    for verb in ("run", "tune"):
        with pytest.raises(SystemExit) as ended:
            main([verb, "train.py"])
        assert ended.value.code == 2
        assert f"{tmp_path / module} has the name of this package" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["report"], ["watch", "--once", "--out", "x"]])
def test_a_deleted_working_folder_is_told(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 7
    assert capsys.readouterr().err.startswith("fulltilt: the working folder is not there any more\n")


@pytest.mark.parametrize(("words", "wanted"), [("fulltilt rep", "report"), ("fulltilt run --au", "--auto")])
def test_completion_knows_verbs_and_flags(
    words: str, wanted: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_FULLTILT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit):
        main([])
    assert capfd.readouterr().out.split() == [wanted]


def test_elsewhere_than_on_linux_only_watch_is_offered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SystemExit) as ended:
        main(["run", "train.py"])
    assert ended.value.code == 7
    assert "fulltilt run needs Linux; this is darwin" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["watch", "--help"])
    assert not ended.value.code
