"""The command's own standard streams and what it tells there: errors, hints and one status line.

The streams are there, take any character, and what goes to stderr never fails.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fulltilt.report.console import PIPED_COLUMNS, can_redraw, let_print

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# What argparse, click and others end with when they do not know a flag.
USAGE_ERROR = 2
# Of a verb that runs a job: what stands behind the first word of that is not for us.
JOB_BEHIND_IT = {"context_settings": {"allow_interspersed_args": False}, "options_metavar": "[OPTIONS] [--]"}


class _BestEffortFile(io.FileIO):
    """Drops what cannot be written: a full disk under a log, or a reader that has gone, is no reason to stop a job."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def prepare() -> None:
    """Make standard output and standard error fit for everything that a verb prints."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with it closed: >&-
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open to the end
    given = sys.__stderr__  # Python holds on to it, so that its descriptor stays open
    if given is not None and sys.stderr is given:
        heedless = io.BufferedWriter(_BestEffortFile(given.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(heedless, encoding=given.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        let_print(stream)


def silence_stdout() -> None:
    """What is still buffered cannot be written either; Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(message: str) -> None:
    """Tell of an error, what to do about it indented below."""
    first, *rest = message.strip().splitlines() or ["failed"]
    tell(f"fulltilt: {first}")
    for line in rest:
        tell(f"  {line}")


def tell(line: str = "") -> None:
    """Print a line on standard error. Names of files and processes in it may hold anything."""
    from fulltilt.figures import clean

    print(clean(line), file=sys.stderr, flush=True)


def examples(*commands: str) -> str:
    """The end of a verb's help: commands to copy, each with what it does behind a #. The help does not re-wrap them."""
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


def tell_wrapped(line: str, *, bold: bool = False) -> None:
    """Like ``tell``; the line is wrapped at words and hangs below its beginning, in a log at ``PIPED_COLUMNS``."""
    from fulltilt.figures import clean

    seen = sys.stderr.isatty()
    bold = bold and seen and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    columns = shutil.get_terminal_size((80 if seen else PIPED_COLUMNS + 1, 24)).columns
    for row in wrapped(clean(line), columns):
        print(f"\x1b[1m{row}\x1b[0m" if bold else row, file=sys.stderr, flush=True)


def wrapped(line: str, columns: int) -> list[str]:
    """The rows of a line: ``  1. Data loading: …`` goes on below ``Data``, any other two spaces in."""
    beginning = len(line) - len(line.lstrip(" 0123456789.")) if line.startswith(" ") else 2
    rows = textwrap.wrap(
        line, max(columns - 1, 30), subsequent_indent=" " * beginning, break_long_words=False, break_on_hyphens=False
    )
    return rows or [""]


def tell_of_flags(verb: str, flags: Collection[str], arguments: Sequence[str]) -> None:
    """Tell where those ``flags`` of a verb belong that stand behind the first of the job's arguments."""
    behind = {argument.partition("=")[0] for argument in arguments[1:]}
    for flag in (flag for flag in flags if flag in behind):
        tell(f"fulltilt: {flag} goes to the script; a flag of fulltilt {verb} stands before it")


class StatusBar:
    """One line in the terminal's last row that the job's own output scrolls past, and that leaves nothing behind.

    Does nothing where the stream is no terminal, and in a notebook, whose cells run commands under one.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.on = os.name == "posix" and can_redraw(stream)
        self._rows = 0

    def show(self, text: str) -> None:
        """Replace the line."""
        if not self.on:
            return
        columns, rows = shutil.get_terminal_size()
        if rows < 4:
            return
        out = ""
        if rows != self._rows:
            # A new line first, so that the reserved row is not one with output on it; then shrink what scrolls.
            out += f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A"
            self._rows = rows
        line = text if len(text) < columns else text[: columns - 2] + "…"
        self._write(f"{out}\x1b7\x1b[{rows};1H\x1b[2K\x1b[2m{line}\x1b[0m\x1b8")

    def close(self) -> None:
        """Give the row back."""
        if self._rows:
            self._write(f"\x1b7\x1b[1;{self._rows}r\x1b[{self._rows};1H\x1b[2K\x1b8")
            self._rows = 0

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self.on = False
