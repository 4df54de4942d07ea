"""A study at work: asks which trial comes next, runs it, keeps it. Stopped at any moment, it loses one trial."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from fulltilt import __version__, store
from fulltilt.errors import FulltiltError, RunFolderError, UsageError
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.machine import describe_machine
from fulltilt.records import Run, RunRecord, Trial
from fulltilt.tuning.assignment import ANSWER_FILE, Answer, Assignment
from fulltilt.tuning.course import SHORTEST_START_S, next_step, time_limit_s
from fulltilt.tuning.folder_watch import MOST_NAMED, Snapshot, differences, look, taken_away
from fulltilt.tuning.interval import Patience
from fulltilt.tuning.made import clear_up
from fulltilt.tuning.outcome import Attempt, conclude
from fulltilt.tuning.processes import AnewStarts, ForkedStarts, RecipeStarts, Starts
from fulltilt.tuning.safe_copies import FOLDER as COPIES
from fulltilt.tuning.safe_copies import copy_files, keep_changed
from fulltilt.tuning.space import Space, streams_alone
from fulltilt.tuning.study_record import STUDY_FILE, StudyRecord, changed_file, identity, learned
from fulltilt.tuning.template import CANNOT_FORK
from fulltilt.tuning.trial_run import Limits, run_trial
from fulltilt.tuning.trials import best_of, is_valid, rate

# A search trial that is surely below this share of the best need not be measured more exactly.
OUT_OF_THE_RACE = 0.9
# A script that has come to no loader by then may never come to one; it is then started anew for each trial.
TEMPLATE_LIMIT_S = 300.0
# Of the time that there is for the first trial.
TEMPLATE_SHARE = 0.5
# A first fork that has not ended by then most likely waits for a thread that was not forked with it.
FIRST_FORK_S = 60.0
FIRST_FORK_FACTOR = 5.0
TRIALS_FILE = "trials.jsonl"


class Study:
    """The trials of one command in one folder."""

    def __init__(
        self,
        arguments: list[str],
        command: list[str],
        folder: Path,
        space: Space,
        trial_limit_s: float | None,
        tell: Callable[[str], None],
        patience: Patience | None = None,
    ) -> None:
        self._arguments = arguments
        self._command = command
        self._shown = folder
        self._folder = folder.absolute()  # the script may change its working folder
        self._space = space
        self._trial_limit_s = trial_limit_s
        self._tell = tell
        self._patience = patience or Patience()
        self._gpus = Gpus.open()
        self._starts: Starts | None = None
        self._files: Snapshot | None = None
        self._taken_away: list[str] = []
        self.record = self._open()
        self.trials: list[Trial] = list(store.read_lines(folder / TRIALS_FILE, Trial))
        if self.trials and not any(map(is_valid, self.trials)):
            # The user has mended what made them fail, or would like to know whether it still does.
            tell(f"nothing could be measured in {folder} so far; the study begins anew")
            self.trials = []
            (folder / TRIALS_FILE).unlink()
        self._writer = store.LineWriter(folder / TRIALS_FILE)

    # ------------------------------------------------------------------ the folder

    def _open(self) -> StudyRecord:
        path = self._folder / STUDY_FILE
        fresh = StudyRecord(
            command=tuple(self._arguments),
            working_folder=str(Path.cwd()),
            allow=tuple(sorted(self._space.allow)),
            started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        )
        if not path.exists():
            if any(self._folder.iterdir()):  # a study deletes and replaces what lies in its folder
                raise UsageError(
                    f"{self._shown} holds other things than a study", "Choose a folder for the study alone with --out."
                )
            store.write_json(path, fresh)
            return fresh
        kept = store.read_record(path, StudyRecord)
        if (kept.command, kept.working_folder, kept.allow) != (fresh.command, fresh.working_folder, fresh.allow):
            raise UsageError(
                f"{self._folder} holds a study of another command: {' '.join(kept.command)}",
                "Choose another folder with --out.",
            )
        return kept

    def close(self) -> None:
        """End what still runs and clear up."""
        if self._starts is not None:
            self._starts.close()
            self._starts = None
        self._writer.close()
        clear_up(self._folder, self._folder)
        shutil.rmtree(self._folder / "scratch", ignore_errors=True)
        changed = keep_changed(Path.cwd(), self._folder)
        for name in changed[:MOST_NAMED]:
            self._tell(f"{name} is not as it was before the trials; as it was: {self._shown / COPIES / name}")
        if len(changed) > MOST_NAMED:
            self._tell(f"and {len(changed) - MOST_NAMED} more in {self._shown / COPIES}")

    # ------------------------------------------------------------------ trials

    @property
    def space(self) -> Space:
        """What may be tried, by what is known of the job so far."""
        return replace(
            self._space,
            workers_stay=streams_alone(self.record.loader),
            may_persist=self.record.data_set_changes is None and not self.record.passes_overlap,
        )

    def run(self, budget_s: float, trying: Callable[[Attempt, float], None], tried: Callable[[Trial], None]) -> None:
        """Make trials until nothing is left to learn or the budget is spent. Ctrl-C is raised."""
        deadline = time.monotonic() + budget_s
        if next_step(self.trials, self.space, budget_s) is not None:
            self._refuse_changed_script()
        while True:
            left_s = deadline - time.monotonic()
            attempt = next_step(self.trials, self.space, left_s)
            if attempt is None:
                return
            limits = Limits(time_limit_s(self.trials, left_s, self._trial_limit_s), self._space.memory_bytes)
            trial = self.measure(attempt, limits, partial(trying, attempt))
            self.trials.append(trial)
            self._writer.write([trial])
            tried(trial)

    def _refuse_changed_script(self) -> None:
        """Trials of a study that was stopped cannot be compared with those of a script that has changed since."""
        file = changed_file(self.record, self._arguments) if self.trials else None
        if file is not None:
            raise UsageError(
                f"{file} has changed since the first of the {len(self.trials)} trials in {self._folder} was made",
                "Study it anew: choose another folder with --out.",
            )

    def measure(self, attempt: Attempt, limits: Limits, tick: Callable[[float], None] = lambda _: None) -> Trial:
        """Run one trial, which is not kept. A forked start that fails is tried once more from the beginning."""
        folder = self._folder / "trials" / f"trial-{len(self.trials) + 1:03d}"
        shutil.rmtree(folder, ignore_errors=True)  # one that was cut off
        self._taken_away = []
        before = self._files or self._look_and_copy()
        if attempt.purpose == "start":
            trial = self._first(attempt, folder, limits, tick)
        else:
            trial = self._attempt(attempt, folder, self._ready(), limits, tick)
        shutil.rmtree(folder / "scratch", ignore_errors=True)
        self._files = look(Path.cwd(), self._folder)
        return replace(
            trial,
            changed_files=(*differences(before, self._files), *taken_away(self._taken_away, Path.cwd())),
            folder=str(folder.relative_to(self._folder)),
        )

    def _look_and_copy(self) -> Snapshot:
        files = look(Path.cwd(), self._folder)
        copy_files(files, Path.cwd(), self._folder)
        return files

    def _first(self, attempt: Attempt, folder: Path, asked: Limits, tick: Callable[[float], None]) -> Trial:
        """The script as it is. However often it has to be started for that, all of it together has one limit."""
        allowed_s = max(asked.time_s, SHORTEST_START_S)
        until = time.monotonic() + allowed_s

        def limits(longest_s: float = math.inf) -> Limits:
            return replace(asked, time_s=min(asked.time_s, longest_s, until - time.monotonic()))

        starts = self._ready(min(TEMPLATE_LIMIT_S, TEMPLATE_SHARE * allowed_s))
        if not isinstance(starts, ForkedStarts):
            return self._attempt(attempt, folder, starts, limits(), tick)
        forks_s = FIRST_FORK_S + FIRST_FORK_FACTOR * starts.opened_in_s
        trial = self._attempt(attempt, folder, starts, limits(forks_s), tick)
        failed = trial.state in ("crashed", "timed_out") and not _ended_by_itself(folder)
        if failed and isinstance(self._starts, ForkedStarts) and limits().time_s > starts.opened_in_s:
            # True to the script above all: perhaps it is only the fork that it does not survive.
            self._start_anew(f"the forked script failed ({trial.note or trial.state})")
            shutil.rmtree(folder, ignore_errors=True)
            trial = self._attempt(attempt, folder, self._ready(), limits(), tick)
        return trial

    def _attempt(
        self, attempt: Attempt, folder: Path, starts: Starts, limits: Limits, tick: Callable[[float], None]
    ) -> Trial:
        assignment = Assignment(
            settings=attempt.settings,
            folder=str(folder),
            scratch=str((folder / "scratch").absolute()),
            loader=identity(self.record.loader),
            patience=self._patience_for(attempt),
        )
        record = RunRecord(
            name=f"{folder.name}",
            command=tuple(self._arguments),
            started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=describe_machine(self._gpus),
            fulltilt=__version__,
            asked=attempt.settings,
        )
        try:
            ended = run_trial(starts, assignment, record, limits, self._gpus, tick)
        finally:
            self._taken_away += clear_up(folder, self._folder)
        if ended.status == CANNOT_FORK and isinstance(starts, ForkedStarts):
            self._start_anew("the GPU was touched before the fork")
            shutil.rmtree(folder, ignore_errors=True)
            return self._attempt(attempt, folder, self._ready(), limits, tick)
        answer = _read(folder / ANSWER_FILE)
        run = _load(folder)
        start = next((trial for trial in self.trials if trial.purpose == "start" and trial.state == "ok"), None)
        trial = conclude(attempt, ended, answer, run, start, assignment.loader)
        if attempt.purpose == "start" and run is not None and run.ranks:
            self.record = learned(self.record, run, answer, self._arguments)
            store.write_json(self._folder / STUDY_FILE, self.record)
        return trial

    def _patience_for(self, attempt: Attempt) -> Patience:
        best = best_of(self.trials) if attempt.purpose == "search" else None
        return self._patience if best is None else replace(self._patience, to_beat=OUT_OF_THE_RACE * rate(best))

    # ------------------------------------------------------------------ how trials start

    def _ready(self, template_limit_s: float = TEMPLATE_LIMIT_S) -> Starts:
        if self._starts is None and self._arguments[:2] == ["fulltilt", "train"]:
            self._starts = RecipeStarts(self._command, self._folder / "scratch", self._folder / "recipe")
        elif self._starts is None:
            template = store.create_folder(self._folder / "template")
            forked = ForkedStarts.open(self._command, template, self._folder / "scratch", template_limit_s)
            if isinstance(forked, str):
                self._start_anew(forked)
            else:
                self._starts = forked
        assert self._starts is not None
        return self._starts

    def _start_anew(self, why: str) -> None:
        if self._starts is not None:
            self._starts.close()
        clear_up(self._folder, self._folder)  # what the script made up to its first loader, it will make again
        self._starts = AnewStarts(self._command, self._folder / "scratch")
        self._tell(f"each trial starts the script anew: {why}")


def _ended_by_itself(folder: Path) -> bool:
    return store.read_record(folder / store.RUN_FILE, RunRecord).state == "done"


def _read(path: Path) -> Answer | None:
    try:
        return store.read_record(path, Answer)
    except RunFolderError:
        return None


def _load(folder: Path) -> Run | None:
    try:
        return store.load(folder)
    except FulltiltError as error:
        print(f"fulltilt: {error}", file=sys.stderr)
        return None
