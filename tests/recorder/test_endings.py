"""How a run ended: the same words whether its job was attached to, recorded by hand, or left by a way of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fulltilt.cli.run import state_of
from fulltilt.errors import StoppedEarly
from fulltilt.recorder.hooks import Patches, processes
from fulltilt.recorder.hooks.processes import ExitHooks
from fulltilt.recorder.manual_recording import ending_of


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (None, ("done", None, None)),
        (SystemExit(), ("done", 0, None)),
        (SystemExit(0), ("done", 0, None)),
        (SystemExit(7), ("crashed", 7, None)),
        (SystemExit("no data"), ("crashed", 1, None)),
        (KeyboardInterrupt(), ("interrupted", None, None)),
        (StoppedEarly("the time is up"), ("interrupted", 3, None)),
        (RuntimeError("shapes"), ("crashed", None, "RuntimeError")),
    ],
)
def test_what_left_the_block_says_how_the_run_ended(error: BaseException | None, ended: Any) -> None:
    assert ending_of(error) == ended


@pytest.mark.parametrize(
    ("status", "by_itself", "state"),
    [
        *[(0, True, "done"), (1, True, "crashed"), (3, False, "crashed"), (200, False, "crashed")],
        *[(-2, True, "interrupted"), (130, True, "interrupted")],
        *[(-9, False, "killed"), (-15, True, "killed"), (143, False, "killed"), (137, False, "killed")],
        (143, True, "crashed"),  # sys.exit(143): nobody killed it
    ],
)
def test_a_status_says_how_the_job_ended(status: int, by_itself: bool, state: str) -> None:
    assert state_of(status, by_itself) == state


# --------------------------------------------------------------------------- leaving without exit handlers


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happened, in order; the functions that end a process only say that they were called."""
    order: list[Any] = []
    for name in ("_exit", "abort"):
        monkeypatch.setattr(os, name, lambda *given, name=name: order.append((name, *given)))
    return order


@pytest.fixture
def patched(happened: list[Any]) -> Iterator[Callable[..., ExitHooks]]:
    swapped = Patches()

    def install() -> ExitHooks:
        recorder: Any = SimpleNamespace(active=True, pid=os.getpid(), on_training_thread=lambda: False)
        patches = ExitHooks(recorder, lambda status: happened.append(("written", status)))
        patches.install(swapped)
        return patches

    yield install
    swapped.restore()


def test_the_record_is_written_before_the_process_leaves_with_its_own_code(patched: Any, happened: list[Any]) -> None:
    patched()
    os._exit(5)
    os.abort()
    assert happened == [("written", 5), ("_exit", 5), ("written", -6), ("abort",)]


def test_a_process_may_name_its_status(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[dict[str, int]] = []
    monkeypatch.setattr(os, "_exit", lambda **named: left.append(named))
    patched()
    os._exit(status=3)
    assert left == [{"status": 3}]


def test_a_record_that_hangs_or_fails_keeps_nobody_from_leaving(
    patched: Any, happened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PATIENCE_S", 0.01)
    for_ever = threading.Event()
    patched().write_record = lambda _: for_ever.wait() and None
    os._exit(3)
    for_ever.set()
    assert happened == [("_exit", 3)]


def test_a_forked_child_leaves_at_once(patched: Any, happened: list[Any]) -> None:
    patched()._recorder.pid = os.getppid()
    os._exit(0)
    assert happened == [("_exit", 0)]
