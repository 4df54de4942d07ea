"""What a terminal without Unicode shows."""

from __future__ import annotations

import io
import sys

import pytest

from fulltilt.cli.main import main
from fulltilt.report.console import encodable, open_console


def test_a_question_mark_stands_for_what_the_encoding_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(taken, encoding="ascii", write_through=True))
    with pytest.raises(SystemExit):
        main(["report", "5 × 5 …"])
    assert b"5 ? 5 ?" in taken.getvalue()
    assert encodable("1.8 × as fast: 1 → 2", "cp1252") == "1.8 × as fast: 1 ? 2"


def test_a_reader_that_has_gone_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: `fulltilt report RUN | head -1` ended with 1, which rich gives, in place of 141."""

    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        open_console().print("verdict")
