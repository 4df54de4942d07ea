"""What is shown where the encoding lacks a character: × as x, → as ->, other letters as escapes, never a traceback."""

from __future__ import annotations

import codecs
import contextlib
import io
from typing import TextIO

ERRORS = "fulltilt.plain"

_PLAIN = {
    "×": "x",
    "·": "-",
    "–": "-",
    "—": "-",
    "┄": "-",
    "─": "-",
    "→": "->",
    "…": "...",
    "±": "+-",
    "µ": "u",
    "≥": ">=",
    "≤": "<=",
    "≈": "~",
    "°": "",
    "√": "sqrt",
    "⚠": "!",
    "\ufe0f": "",  # it makes the character before it a picture
    "█": "#",
    "▓": "#",
    "▒": "=",
    "░": ".",
}


def let_print(stream: TextIO | None) -> None:
    """From now on the stream takes any character; those that its encoding lacks come out plain."""
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(OSError, ValueError):
            stream.reconfigure(errors=ERRORS)


def encodable(text: str, encoding: str) -> str:
    """The text with nothing in it that the encoding lacks."""
    return text.encode(encoding, ERRORS).decode(encoding)


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(one, one.encode("ascii", "backslashreplace").decode()) for one in lacking), error.end


codecs.register_error(ERRORS, _plainly)
