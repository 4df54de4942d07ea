"""`fulltilt report`: one run, or several side by side, in the terminal, as a page and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fulltilt import store
from fulltilt.cli.streams import tell
from fulltilt.cli.tune import show_study
from fulltilt.diagnosis import answer
from fulltilt.errors import FulltiltError, UsageError
from fulltilt.figures import clean
from fulltilt.records import Trial
from fulltilt.report import page, terminal
from fulltilt.report.answer import to_plain
from fulltilt.report.console import open_console
from fulltilt.report.run_view import Reported
from fulltilt.tuning.search_space import best_of
from fulltilt.tuning.solutions import trial_line
from fulltilt.tuning.study import STUDY_FILE, TRIALS_FILE, StudyRecord

RUNS_FOLDER = Path("fulltilt-runs")
COMPARISON_FILE = Path("fulltilt-report.html")


EXAMPLES = (
    "fulltilt report                         # the newest run",
    "fulltilt report fulltilt-runs/*-train   # several, side by side",
    "fulltilt report runs/a --json | jq .verdict.code",
    "fulltilt report runs/a --html a.html",
)


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Run folders; without one, the newest in fulltilt-runs.")
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON and nothing else; a list for several runs.")
    ] = False,
    html: Annotated[Path | None, typer.Option(metavar="PATH", help="Where to write the page.")] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="Write no page.")] = False,
    width: Annotated[int | None, typer.Option(min=40, metavar="N", help="Columns of the terminal view.")] = None,
) -> None:
    """Explain a run in the terminal and as a page.

    Shows the verdict, where the wall time went, one step to scale, findings with their fixes, and the
    costliest lines. The page is report.html in the run folder. Several runs are shown side by side, with a
    comparison page in the current folder.
    """
    if html is not None and no_page:
        raise UsageError("--html and --no-page contradict each other")
    folders = runs or [store.newest_run(RUNS_FOLDER)]
    if len(folders) == 1 and (folders[0] / STUDY_FILE).is_file() and not (json_ or html):
        trials = list(store.read_lines(folders[0] / TRIALS_FILE, Trial))
        record = store.read_record(folders[0] / STUDY_FILE, StudyRecord)
        for number, trial in enumerate(trials, start=1):
            print(clean(trial_line(number, trial, best_of(trials))))
        show_study(open_console(), record, trials, folders[0])
        return
    shown: list[Reported] = [(run, answer(run)) for run in map(store.load, folders)]
    # The page first: the reader of the rest may close the pipe (`| head`).
    unasked = None
    if html is not None:
        page.write(html, shown)
    elif not json_ and not no_page:
        unasked = _write_page(COMPARISON_FILE if len(shown) > 1 else folders[0] / store.REPORT_FILE, shown)
    if json_:
        answers = [to_plain(diagnosis, run) for run, diagnosis in shown]
        # ASCII, so that it survives whatever encoding the reader's pipe has.
        print(json.dumps(answers[0] if len(answers) == 1 else answers, indent=2, allow_nan=False))
    else:
        console = open_console()
        console.width = width or console.width
        terminal.show(console, shown)
    if unasked is not None:
        print(f"\npage: {clean(str(unasked))}")


def _write_page(path: Path, shown: Sequence[Reported]) -> Path | None:
    """Write the default page; a read-only folder is reported and is no failure."""
    try:
        page.write(path, shown)
    except FulltiltError as error:
        tell(f"fulltilt: no page: {error.what}. Choose a place with --html PATH.")
        return None
    return path
