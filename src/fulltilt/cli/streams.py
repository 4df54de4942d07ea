"""Standard output and standard error of a command: errors, hints and one status line.

Both streams exist and take any character; writing to standard error never fails.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fulltilt.figures import clean
from fulltilt.report.console import PIPED_COLUMNS, can_redraw, let_print

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Exit code of argparse, click and others for an unknown flag.
USAGE_ERROR = 2
# For commands that run a job: flags after the first word of the job belong to the job.
JOB_COMMAND = {"context_settings": {"allow_interspersed_args": False}, "options_metavar": "[OPTIONS] [--]"}


class _BestEffortFile(io.FileIO):
    """Drops what cannot be written: a full disk or a closed pipe must not stop a job."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def prepare() -> None:
    """Make standard output and standard error take everything that a command prints."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open to the end
    given = sys.__stderr__  # Python holds on to it, so that its descriptor stays open
    if given is not None and sys.stderr is given:
        heedless = io.BufferedWriter(_BestEffortFile(given.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(heedless, encoding=given.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        let_print(stream)


def silence_stdout() -> None:
    """Drop what is still buffered: Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(message: str) -> None:
    """Print an error, and what to do about it indented below."""
    first, *rest = message.strip().splitlines() or ["failed"]
    tell(f"fulltilt: {first}")
    for line in rest:
        tell(f"  {line}")


def tell(line: str = "") -> None:
    """Print a line on standard error, with control characters made visible."""
    print(clean(line), file=sys.stderr, flush=True)


def examples(*commands: str) -> str:
    """The examples at the end of a help text, which typer does not re-wrap."""
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


def tell_wrapped(line: str, *, bold: bool = False) -> None:
    """Like ``tell``, wrapped at words with a hanging indent; in a log at ``PIPED_COLUMNS``."""
    is_terminal = sys.stderr.isatty()
    bold = bold and is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    columns = shutil.get_terminal_size((80 if is_terminal else PIPED_COLUMNS + 1, 24)).columns
    for row in wrapped(clean(line), columns):
        print(f"\x1b[1m{row}\x1b[0m" if bold else row, file=sys.stderr, flush=True)


def wrapped(line: str, columns: int) -> list[str]:
    """The rows of a line. ``  1. Data loading: …`` continues below ``Data``, any other line two spaces in."""
    beginning = len(line) - len(line.lstrip(" 0123456789.")) if line.startswith(" ") else 2
    whole = re.sub(r"(?<=\d) (?=[%×])", "\u00a0", line)  # textwrap does not break there
    rows = textwrap.wrap(
        whole, max(columns - 1, 30), subsequent_indent=" " * beginning, break_long_words=False, break_on_hyphens=False
    )
    return [row.replace("\u00a0", " ") for row in rows] or [""]


def warn_of_flags(command: str, flags: Collection[str], arguments: Sequence[str]) -> None:
    """Warn of ``flags`` of a command that were given after the script, and so to the script."""
    given = {argument.partition("=")[0] for argument in arguments[1:]}
    for flag in (flag for flag in flags if flag in given):
        tell(f"fulltilt: {flag} was given to the script; flags of fulltilt {command} go before it")


class StatusBar:
    """One line in the terminal's last row, above which the job's output scrolls; it is erased at the end.

    Does nothing where the stream is no terminal, nor in a notebook.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.on = can_redraw(stream)
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
            # A new line first, so that the reserved row holds no output; then shrink the scrolling region.
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
