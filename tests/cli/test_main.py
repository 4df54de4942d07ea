"""The command itself, before any verb of it runs."""

from __future__ import annotations

import subprocess
import sys

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
