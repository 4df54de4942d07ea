"""One line at the bottom of the terminal that the job's own output scrolls past, and that leaves nothing behind."""

from __future__ import annotations

import os
import shutil
from typing import TextIO


class StatusBar:
    """Reserves the terminal's last row. Does nothing where the stream is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.on = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and os.name == "posix"
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
