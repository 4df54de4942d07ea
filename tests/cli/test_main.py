"""The command itself, before any verb of it runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
