"""The command's own standard streams: they are there, they take any character, and what goes to stderr never fails."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fulltilt.report.plain_text import let_print

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Heedless(io.FileIO):
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
        heedless = io.BufferedWriter(_Heedless(given.fileno(), "w", closefd=False))
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
