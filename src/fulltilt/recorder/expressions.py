"""The source text behind a position in bytecode."""

from __future__ import annotations

import linecache
import re
from functools import lru_cache
from types import CodeType

# Of a statement with a body (the loop itself), the first line says enough.
BODY = re.compile(r"(async |for |while |with |if |try:|def |class )")
# A quotation mark behind the # may end a string that it stands in.
COMMENT = re.compile(r"\s+#[^'\"]*$")
LONGEST = 200
MOST_LINES = 20
# A script that compiles code as it goes must not fill the memory.
REMEMBERED = 4096

Span = tuple[int | None, int | None, int | None, int | None]


@lru_cache(REMEMBERED)
def expression_at(code: CodeType, position: int) -> str | None:
    """The source text of the expression at a bytecode position, at most one line of it; None where unknown."""
    line, end_line, column, end_column = _span_at(code, position)
    if line is None or end_line is None or column is None or end_column is None:
        return None
    lines = [
        linecache.getline(code.co_filename, number) for number in range(line, min(end_line, line + MOST_LINES) + 1)
    ]
    if not lines or not lines[0]:
        return None
    # Columns count bytes of UTF-8.
    if end_line == line:
        text = lines[0].encode()[column:end_column].decode(errors="replace")
    else:
        lines[-1] = lines[-1].encode()[:end_column].decode(errors="replace")
        lines[0] = lines[0].encode()[column:].decode(errors="replace")
        text = lines[0].strip().rstrip(":") if BODY.match(lines[0]) else " ".join(part.strip() for part in lines)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


@lru_cache(REMEMBERED)
def shown_at(code: CodeType, position: int) -> str | None:
    """The source text that tells a reader what happens at a position: a name alone (one stored to) tells nothing."""
    text = expression_at(code, position)
    if text is not None and text.isidentifier():
        text = linecache.getline(code.co_filename, line_at(code, position)).strip()[:LONGEST]
    return COMMENT.sub("", text).rstrip(":") if text is not None else None


def line_at(code: CodeType, position: int) -> int:
    """The line of the instruction at a bytecode position; between two lines, that of the whole function."""
    return _span_at(code, position)[0] or code.co_firstlineno


def _span_at(code: CodeType, position: int) -> Span:
    """First and last line, first and last column of the instruction at a bytecode position."""
    spans = _spans(code)
    return spans[position // 2] if 0 <= position // 2 < len(spans) else (None, None, None, None)


@lru_cache(REMEMBERED)
def _spans(code: CodeType) -> list[Span]:
    return list(code.co_positions())


def last_line(code: CodeType) -> int:
    """The last line of a function, with the functions inside it."""
    own = (end for _, end, _, _ in code.co_positions() if end is not None)
    inner = (last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return max((code.co_firstlineno, *own, *inner))
