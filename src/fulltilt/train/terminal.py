"""Lines that stay, and below them one place that is drawn anew: a progress bar, without a thread of its own."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from typing import TextIO

from fulltilt.report.plain_text import encodable
from fulltilt.report.wording import clean


class Terminal:
    """Writes to ``stream``. Where that is no terminal, what would be drawn anew is written as an ordinary line."""

    def __init__(self, stream: TextIO | None) -> None:
        self._gone = stream is None  # the command was started with its output closed
        self.stream = stream if stream is not None else io.StringIO()
        self.live = self.stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._rows = 0
        self._lock = threading.Lock()  # warnings come from the thread that samples the machine

    def line(self, text: str) -> None:
        """Write a line that stays, above the bar."""
        with self._lock:
            self._write(f"{self._wiped()}{_one_row(text)}\n")

    def bar(self, parts: Sequence[str]) -> None:
        """Draw the bar: its parts in one row where they fit, else a row each, cut at the window's edge."""
        parts = [_one_row(part) for part in parts]
        whole = " | ".join(parts)
        if not self.live:
            with self._lock:
                self._write(f"{whole}\n")
            return
        columns = shutil.get_terminal_size().columns - 1  # a full last column would wrap into the next row
        rows = [whole] if len(whole) <= columns else [part[:columns] for part in parts]
        with self._lock:
            self._write(self._wiped() + "\n".join(rows))
            self._rows = len(rows)

    def keep(self) -> None:
        """Let the bar stand as it is; what comes next goes below it."""
        with self._lock:
            if self._rows:
                self._rows = 0
                self._write("\n")

    def _wiped(self) -> str:
        rows, self._rows = self._rows, 0
        return "\r" + "\x1b[1A" * (rows - 1) + "\x1b[J" if rows else ""

    def _write(self, text: str) -> None:
        if self._gone:
            return
        try:
            self.stream.write(_encodable(text, self.stream))
            self.stream.flush()
        except (OSError, ValueError):  # ValueError: somebody has closed the stream
            self._gone = True  # the window was closed, the reader of the pipe has ended: the training goes on
            _forget_the_rest(self.stream)


def _forget_the_rest(stream: TextIO) -> None:
    """What is still buffered cannot be written either; Python would complain of it at its own end, with code 120."""
    if stream is sys.stdout:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _one_row(text: str) -> str:
    """Names come from anywhere: no codes for the terminal, no line of their own."""
    return clean(text).replace("\n", " ")


def _encodable(text: str, stream: TextIO) -> str:
    """A terminal without Unicode (LANG=C) shows plainer characters."""
    return encodable(text, getattr(stream, "encoding", None) or "utf-8")
