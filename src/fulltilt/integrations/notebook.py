"""Notebooks: ``%load_ext fulltilt``, then ``%%fulltilt`` on top of a cell that trains. Its report appears below it.

``%%fulltilt`` takes ``--out DIR``, the run folder. ``%fulltilt RUN`` shows a run again, without a name the newest.
Commands run as ``!fulltilt run train.py``.
"""

from __future__ import annotations

import re
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.errors import UsageError
from fulltilt.recorder.manual_recording import Recording, show_report

RUNS = Path("fulltilt-runs")


def register(shell: Any) -> None:
    """Add both magics to an IPython shell."""

    def fulltilt(line: str, cell: str | None = None) -> None:
        if cell is None:
            _show(line)
        else:
            _record(shell, line, cell)

    shell.register_magic_function(fulltilt, magic_kind="line_cell", magic_name="fulltilt")


def _record(shell: Any, line: str, cell: str) -> None:
    match shlex.split(line.replace("--out=", "--out ")):
        case []:
            cell_number = re.sub("[^0-9]", "", str(shell.execution_count))
            out = RUNS / f"{datetime.now():%Y%m%d-%H%M%S}-cell-{cell_number}"
        case ["--out", folder]:
            out = Path(folder)
        case _:
            raise UsageError(f"%%fulltilt takes --out DIR, not {line}", "%fulltilt RUN, without a cell, shows a run.")
    recording = Recording(out, name="notebook").start()
    # As a cell of its own: tracebacks and line numbers are those of a cell without the magic.
    result = shell.run_cell(cell)
    recording.stop(error=result.error_in_exec or result.error_before_exec)


def _show(line: str) -> None:
    words = shlex.split(line)
    if len(words) > 1:
        raise UsageError("%fulltilt shows one run", "%fulltilt RUN, or %fulltilt for the newest.")
    show_report(Path(words[0]) if words else store.newest_run(RUNS))
