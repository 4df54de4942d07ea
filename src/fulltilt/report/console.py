"""The terminal that the commands print to; characters that its encoding lacks are replaced by plain ones."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from typing import TextIO

from rich.console import Console

# --------------------------------------------------------------------------- characters that an encoding lacks

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
    **dict(zip("▁▂▃▄▅▆▇█", ".:-=+*%#", strict=True)),
    "▓": "=",
    "▒": "-",
    "░": ".",
}


def let_print(stream: TextIO | None) -> None:
    """Let the stream take any character: those that its encoding lacks are replaced by plain ones."""
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(OSError, ValueError):
            stream.reconfigure(errors=ERRORS)


def encodable(text: str, encoding: str) -> str:
    """The text with plain characters for those that the encoding lacks."""
    return text.encode(encoding, ERRORS).decode(encoding)


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(one, one.encode("ascii", "backslashreplace").decode()) for one in lacking), error.end


codecs.register_error(ERRORS, _plainly)


# --------------------------------------------------------------------------- consoles

# The width of output that is not printed on a terminal: logs are read in windows of about this width.
PIPED_COLUMNS = 100
# Set for programs that cells of Jupyter, Colab and Kaggle start.
NOTEBOOK_VARIABLES = ("JPY_PARENT_PID", "JPY_SESSION_NAME", "COLAB_RELEASE_TAG", "COLAB_GPU", "KAGGLE_KERNEL_RUN_TYPE")


def can_redraw(stream: TextIO) -> bool:
    """Whether a line can be redrawn: on a terminal, but not in a notebook's cell.

    A cell's ``!command`` runs under a pseudo-terminal that keeps every redrawn line.
    """
    environ = os.environ
    # ipykernel sets both pagers for what its cells run.
    notebook = any(name in environ for name in NOTEBOOK_VARIABLES) or (
        environ.get("PAGER") == environ.get("GIT_PAGER") == "cat"
    )
    return stream.isatty() and environ.get("TERM", "dumb") != "dumb" and not notebook


class _PipedConsole(Console):
    def on_broken_pipe(self) -> None:
        """Let the command line end as other programs do; rich would exit with 1, a failure."""
        raise BrokenPipeError


class _QuietConsole(Console):
    def on_broken_pipe(self) -> None:
        """Print no more, and go on."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_console(*, follows_window: bool = False, goes_on: bool = False) -> Console:
    """Standard output as a console. Characters that its encoding lacks are replaced by plain ones.

    With ``follows_window`` its size is always the window's, even if a shell exported COLUMNS and LINES. With
    ``goes_on`` the program goes on when its reader (head, less) has gone.
    """
    let_print(sys.stdout)
    fixed = ("COLUMNS", "LINES") if follows_window else ()
    environ = {name: value for name, value in os.environ.items() if name not in fixed}
    kind = _QuietConsole if goes_on else _PipedConsole
    console = kind(highlight=False, emoji=False, markup=False, _environ=environ)
    if not console.is_terminal and "COLUMNS" not in environ:
        console.width = PIPED_COLUMNS
    return console
