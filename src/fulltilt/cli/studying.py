"""A study as the terminal shows it: progress with the best so far, then how it ended."""

from __future__ import annotations

import math
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from fulltilt.cli.statusbar import StatusBar
from fulltilt.cli.study_ending import end_study
from fulltilt.probes.host import cpu_capacity, memory_headroom_bytes
from fulltilt.records import Settings, Trial
from fulltilt.report.wording import seconds
from fulltilt.tuning.course import next_step
from fulltilt.tuning.outcome import Attempt
from fulltilt.tuning.solutions import in_words
from fulltilt.tuning.space import Space
from fulltilt.tuning.study import Study
from fulltilt.tuning.table import progress_line, rate_words
from fulltilt.tuning.trials import best_of

STOPPED_EARLY = 3
# Of the memory that is free at the beginning: what a trial may hold before it is ended.
TRIAL_MEMORY = 0.9


def conduct(
    arguments: list[str],
    command: list[str],
    folder: Path,
    allow: frozenset[str],
    budget_s: float,
    trial_limit_s: float | None,
    apply: bool,
) -> int:
    """Run a study and print what it found. Returns 0, or 3 when it was stopped early; raises when nothing was found."""
    space = Space(cpu_capacity().usable, allow, int(TRIAL_MEMORY * memory_headroom_bytes()))
    screen = Screen(sys.stderr)
    study = Study(arguments, command, folder, space, trial_limit_s, screen.say)
    if study.trials:
        trials = "1 trial" if len(study.trials) == 1 else f"{len(study.trials)} trials"
        screen.say(f"{folder} has {trials} already; the study goes on from there")
    stopped = False
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _like_ctrl_c)
    try:
        study.run(budget_s, screen.trying, lambda trial: screen.tried(study.trials, trial))
    except KeyboardInterrupt:
        stopped = True
    finally:
        screen.close()
        study.close()
    if stopped or next_step(study.trials, study.space, math.inf) is not None:
        why = "stopped" if stopped else "the time was over before everything was tried"
        allowed = ["--allow", ",".join(sorted(allow))] if allow else []
        again = shlex.join(["fulltilt", "tune", "--out", str(folder), *allowed, *arguments])
        kept = "what was learned is kept" if study.trials else "no trial has ended yet"
        screen.say(f"{why}; {kept}. Go on with: {again}")
    if stopped and not study.trials:
        return STOPPED_EARLY
    end_study(study.record, study.trials, folder, apply, stopped)
    return STOPPED_EARLY if stopped else 0


def _like_ctrl_c(*_: Any) -> None:
    raise KeyboardInterrupt


class Screen:
    """One line for each trial that has ended, and a last row for the one that runs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar = StatusBar(stream)
        self._best: Trial | None = None
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """A line of its own."""
        print(f"fulltilt: {text}", file=self._stream, flush=True)

    def trying(self, attempt: Attempt, wall_s: float) -> None:
        """A trial runs."""
        if self._bar.on:
            best = "" if self._best is None else f" · best so far {rate_words(self._best)} samples/s"
            what = "the script" if attempt.settings == Settings() else in_words(attempt.settings)
            # The reason comes last: a narrow terminal cuts it off.
            self._bar.show(f"fulltilt tune · {what} · {seconds(wall_s)}{best} · {attempt.why}")

    def tried(self, trials: list[Trial], trial: Trial) -> None:
        """A trial has ended."""
        self._best = best_of(trials)
        self.say(progress_line(len(trials), trial, self._best))
        for change in trial.changed_files:
            if change not in self._said:  # most files change in every trial
                self.say(f"  under the working folder: {change}")
        self._said.update(trial.changed_files)

    def close(self) -> None:
        """Give the last row back."""
        self._bar.close()
