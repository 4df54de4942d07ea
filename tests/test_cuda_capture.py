"""A thread of ours says once that it minds its own business, where there is a GPU at all."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from fulltilt import cuda_capture


def test_the_thread_asks_for_the_mode_in_which_it_ruins_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    answers = [3, 0]  # not initialised yet, then done

    def exchange(mode: Any) -> int:
        modes.append(mode._obj.value)
        return answers.pop(0)

    library = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    assert not cuda_capture.use_thread_local_mode()
    assert cuda_capture.use_thread_local_mode()
    assert modes == [1, 1]


@pytest.mark.parametrize("library", [None, SimpleNamespace()], ids=["no driver", "an old driver"])
def test_without_a_driver_that_knows_it_there_is_nothing_to_ask(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert cuda_capture.use_thread_local_mode()
