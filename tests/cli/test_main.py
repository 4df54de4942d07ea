"""The command itself, before any verb of it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt.cli.main import main

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
