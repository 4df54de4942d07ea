"""How a run ends for its user, where no fault of the catalogue is behind it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from fulltilt.train import checkpoint
from fulltilt.train.ending import exit_code_of


def test_a_path_that_may_not_be_looked_at_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(closed))

    monkeypatch.setattr(checkpoint, "folders", refuse)
    told = io.StringIO()
    assert exit_code_of(refuse, tmp_path / "out", told) == 7
    assert told.getvalue().splitlines() == [
        f"fulltilt: cannot use {closed}: Permission denied",
        "  Give another path, or permission to use it.",
    ]
