"""One command, several ranks on this machine: codes and signals pass through, and nothing is started twice."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from fulltilt.errors import UsageError
from fulltilt.train import launch_ranks
from fulltilt.train.launch_ranks import relaunch


def rank_that(does: str) -> list[str]:
    """A rank without torch: it starts at once."""
    return [sys.executable, "-c", f"import os, signal, sys, time; rank = int(os.environ['RANK']); {does}"]


@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("assert os.environ['WORLD_SIZE'] == '2' and 'OMP_NUM_THREADS' in os.environ", 0),
        ("sys.exit(5 if rank else 0)", 5),
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)", 128 + signal.SIGKILL),
    ],
    ids=["done", "one rank", "both", "killed"],
)
def test_the_code_of_the_ranks_comes_out_as_it_is(does: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    assert relaunch(2, "cpu", rank_that(does)) == code
    assert capfd.readouterr().err == ""
    assert dict(os.environ) == before


def test_a_signal_reaches_every_rank_and_the_ranks_decide(tmp_path: Path) -> None:
    ready = "open(sys.argv[1] + f'/{rank}', 'w').close()"
    waits = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); {ready}; time.sleep(60)"

    def terminate() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=terminate)
    sender.start()
    began = time.monotonic()
    handler = signal.getsignal(signal.SIGTERM)
    assert relaunch(2, "cpu", [*rank_that(waits), str(tmp_path)]) == 3
    sender.join()
    assert time.monotonic() - began < 30
    assert signal.getsignal(signal.SIGTERM) == handler


def test_nothing_is_started_where_the_ranks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_ranks, "_run_ranks", lambda *_: pytest.fail("started"))
    assert relaunch(1) is None
    for launcher in (
        {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
        {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"},
    ):
        with monkeypatch.context() as patched:
            for name, value in launcher.items():
                patched.setenv(name, value)
            assert relaunch(2) is None


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        relaunch(0)
    with pytest.raises(UsageError, match="torch sees"):
        relaunch(2, "cuda")
