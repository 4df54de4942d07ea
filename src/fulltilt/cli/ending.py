"""The end of `fulltilt run`: how the job ended, the diagnosis, the page, and the verdict on the terminal."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fulltilt import store
from fulltilt.cli.streams import complain, tell
from fulltilt.diagnosis import answer
from fulltilt.errors import FulltiltError
from fulltilt.probes.jobs import still_running
from fulltilt.records import RunRecord
from fulltilt.report.explain import explain
from fulltilt.report.terminal import verdict_lines

FATAL = frozenset(
    getattr(signal, name)
    for name in ("SIGHUP", "SIGQUIT", "SIGABRT", "SIGBUS", "SIGKILL", "SIGSEGV", "SIGTERM")
    if hasattr(signal, name)
)


def end_run(folder: Path, record: RunRecord, wall_s: float, status: int, oom_kills: int = 0) -> None:
    """Write what is left to write and print the verdict. A problem here never changes how the job ended."""
    try:
        by_itself = ended_by_itself(folder)
        state = state_of(status, by_itself)
        ended = replace(record, state=state, wall_s=wall_s, exit_code=status, oom_kills=oom_kills)
        refused: FulltiltError | None = None
        try:
            store.write_json(folder / store.RUN_FILE, ended)
            _, diagnosis = explain(folder)
        except FulltiltError as error:  # a full disk or a foreign report.html is no reason to keep the verdict back
            refused, diagnosis = error, answer(replace(store.load(folder), run=ended))
        tell()  # the job's own last line may have no end: progress bars leave it open
        for line in verdict_lines(diagnosis, folder if refused is None else None):
            tell(line)
        if refused is not None:
            complain(str(refused))
        if state == "done" and not by_itself and (pids := still_running(folder)):
            going_on = f"the job goes on in the background (process {', '.join(map(str, pids))})"
            tell(f"fulltilt: {going_on}: fulltilt report {folder} tells of it later")
        if (problem := settings_not_in_force(dict(diagnosis.settings))) is not None:
            tell(f"fulltilt: {problem}")
        if store.OwnedFolder(folder).owns(store.SETTINGS_FILE):
            tell(f"  settings found: {folder / store.SETTINGS_FILE} (for fulltilt run --settings)")
    except FulltiltError as error:
        complain(str(error))
    except Exception as error:  # a mistake of ours is no failure of the job's
        if os.environ.get("FULLTILT_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}"
        tell(f"fulltilt: this run could not be explained, by a mistake of Fulltilt's own ({what})")
        tell(f"  what was recorded of it: {folder}")


def settings_not_in_force(settings: Mapping[str, object]) -> str | None:
    """That the workers of `--settings` did not come into force, and what to do; None when they did."""
    asked, workers = settings.get("asked.num_workers"), settings.get("num_workers")
    if asked is None or workers in (None, asked) or "live" in settings:
        return None
    where = settings.get("loader")
    return (
        f"--settings is not in force: the training loader at {where} has num_workers={workers}, not {asked}. "
        f'A loader that does not shuffle must be named in the file: "loader": "{where}"'
    )


def ended_by_itself(folder: Path) -> bool:
    """Whether the processes that trained came to their own end, and wrote it down."""
    try:
        ranks = store.read_ranks(folder).values()
    except (FulltiltError, OSError):
        return False  # nobody knows; it is told where the run is explained
    return bool(ranks) and all(rank.finished for rank in ranks)


def state_of(status: int, by_itself: bool = False) -> Literal["done", "crashed", "interrupted", "killed"]:
    """How a job ended, from its exit status, and whether the training processes came to their own end."""
    if status == 0:
        return "done"
    number = -status if status < 0 else status - 128  # a shell in front tells 128 and the signal; so may any script
    if number == signal.SIGINT:
        return "interrupted"
    return "killed" if status < 0 or (number in FATAL and not by_itself) else "crashed"
