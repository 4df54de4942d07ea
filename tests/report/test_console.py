"""What a terminal without Unicode shows."""

from __future__ import annotations

import io
import sys

import pytest

from fulltilt.cli.main import main
from fulltilt.report.console import encodable, open_console


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        ("1.5 to 1.8 × as fast: 1 → 2 …", "ascii", "1.5 to 1.8 x as fast: 1 -> 2 ..."),
        ("[██··] 334 ± 10 · 25 µs", "ascii", "[##--] 334 +- 10 - 25 us"),
        ("1.8 × as fast: 1 → 2", "cp1252", "1.8 × as fast: 1 -> 2"),
        ("données/車", "ascii", r"donn\xe9es/\u8eca"),
        ("données/車 ×", "utf-8", "données/車 ×"),
    ],
)
def test_a_plain_character_stands_for_one_that_the_encoding_lacks(text: str, encoding: str, shown: str) -> None:
    assert encodable(text, encoding) == shown


def test_what_fulltilt_says_is_printed_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(taken, encoding="ascii", write_through=True))
    with pytest.raises(SystemExit):
        main(["report", "5 × 5 …"])
    assert b"5 x 5 ..." in taken.getvalue()


def test_a_reader_that_has_gone_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: `fulltilt report RUN | head -1` ended with 1, which rich gives, in place of 141."""

    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        open_console().print("verdict")
