"""The terminal that the verbs print on; what its encoding lacks is printed plainly, never as a traceback."""

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


# --------------------------------------------------------------------------- consoles

# A line of what is not printed on a terminal: logs are read in windows of about this width, and in editors.
PIPED_COLUMNS = 100
# Set in all that the cells of Jupyter, Colab and Kaggle start.
NOTEBOOK_VARIABLES = ("JPY_PARENT_PID", "JPY_SESSION_NAME", "COLAB_RELEASE_TAG", "COLAB_GPU", "KAGGLE_KERNEL_RUN_TYPE")


def can_redraw(stream: TextIO) -> bool:
    """Whether a line can be drawn anew: on a terminal that is not a notebook's cell.

    A cell's ``!command`` runs under a pseudo-terminal, but every line that is drawn anew stays there.
    """
    environ = os.environ
    # ipykernel, whoever starts it, takes both pagers away from what its cells run.
    notebook = any(name in environ for name in NOTEBOOK_VARIABLES) or (
        environ.get("PAGER") == environ.get("GIT_PAGER") == "cat"
    )
    return stream.isatty() and environ.get("TERM", "dumb") != "dumb" and not notebook


class _Piped(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command line, which ends as other programs do; rich would end with 1, a failure."""
        raise BrokenPipeError


class _Heedless(Console):
    def on_broken_pipe(self) -> None:
        """Say no more, and go on."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_console(*, follows_window: bool = False, goes_on: bool = False) -> Console:
    """Standard output as a console. What its encoding lacks is printed plainly, never as a traceback.

    With ``follows_window`` its size is always the window's, also where a shell exported COLUMNS and LINES once. With
    ``goes_on`` there is more to do than to print, also where whoever reads it (head, less) has gone.
    """
    let_print(sys.stdout)
    fixed = ("COLUMNS", "LINES") if follows_window else ()
    environ = {name: value for name, value in os.environ.items() if name not in fixed}
    kind = _Heedless if goes_on else _Piped
    console = kind(highlight=False, emoji=False, markup=False, _environ=environ)
    if not console.is_terminal and "COLUMNS" not in environ:
        console.width = PIPED_COLUMNS
    return console
