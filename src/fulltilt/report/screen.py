"""The terminal that the verbs print on."""

from __future__ import annotations

import os
import sys

from rich.console import Console

from fulltilt.report.plain_text import let_print


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
    return kind(highlight=False, emoji=False, markup=False, _environ=environ)
