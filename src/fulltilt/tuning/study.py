"""A study: asks which trial comes next, runs it and saves it. Stopping it loses one trial at most."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import fmean

from fulltilt import __version__, store
from fulltilt.diagnosis.evidence import gather
from fulltilt.diagnosis.findings import made_for_each_pass
from fulltilt.errors import FulltiltError, RunFolderError, UsageError
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.machine import describe_machine
from fulltilt.records import SCHEMA_VERSION, LoaderRecord, Run, RunRecord, Settings, Trial
from fulltilt.records.secrets import mask_arguments
from fulltilt.store import OwnedFolder
from fulltilt.tuning.next_trial import next_attempt
from fulltilt.tuning.search_space import (
    Attempt,
    Space,
    best_of,
    changes_data_set,
    is_made_in_a_loop,
    is_unsplit_stream,
    is_valid,
    rate,
    start_of,
)
from fulltilt.tuning.source_edit import fingerprint, source_file
from fulltilt.tuning.trial.isolation import Isolation, remove_scratch
from fulltilt.tuning.trial.outcome import trial_record
from fulltilt.tuning.trial.run_trial import SCRATCH, recipe_flags, run_trial
from fulltilt.tuning.trial.throughput import ANSWER_FILE, Answer, Assignment, Patience
from fulltilt.tuning.verification import LEAST_PAIRS, next_verification, pairs_to_keep

KIND = "study"
STUDY_FILE = "study.json"
TRIALS_FILE = "trials.jsonl"
# A search trial that is certainly below this share of the best is not measured further.
OUT_OF_THE_RACE = 0.9
# The time limit of a trial by the time of the start: others start more workers, compile, or load larger batches.
LIMIT_FACTOR = 3.0
LIMIT_MORE_S = 20.0


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """What is studied, and what the first trial showed about it.

    ``source_sha256`` is of the file that makes the loader, ``script_sha256`` of the script in the command;
    ``data_set_changes`` is the line that changes the data set between epochs.
    """

    command: tuple[str, ...]
    working_folder: str
    allow: tuple[str, ...]
    started_at: str
    loader: LoaderRecord | None = None
    source_sha256: str | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    data_set_changes: int | None = None
    script_sha256: str | None = None
    made_each_epoch: bool = False
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", mask_arguments(self.command))


class Study:
    """The trials of one command in one folder, each kept from the user's files by ``isolation``."""

    def __init__(
        self,
        arguments: list[str],
        command: list[str],
        folder: Path,
        space: Space,
        isolation: Isolation,
        trial_limit_s: float | None = None,
        tell: Callable[[str], None] = print,
        patience: Patience | None = None,
    ) -> None:
        self._arguments = arguments
        self._command = command
        self.folder = OwnedFolder.claim(folder.absolute(), KIND)
        self._space = space
        self._isolation = isolation
        self._trial_limit_s = trial_limit_s
        self._patience = patience or Patience()
        self._gpus = Gpus.open()
        self.record = self._open()
        self.trials: list[Trial] = list(store.read_lines(self.folder.path / TRIALS_FILE, Trial))
        if self.trials and not any(map(is_valid, self.trials)):
            # The user may have fixed what made them fail.
            tell(f"nothing could be measured in {folder} so far; the study starts over")
            self.trials = []
            self.folder.remove(TRIALS_FILE)
        if self.trials and (self.trials[-1].purpose, self.trials[-1].settings) == ("verify", Settings()):
            self.trials.pop()  # its pair is missing, and the machine's pace may have changed
        self._writer = store.LineWriter(self.folder.path / TRIALS_FILE)
        self._caches = Path(tempfile.mkdtemp(prefix="fulltilt-caches-"))

    def _open(self) -> StudyRecord:
        path = self.folder.path / STUDY_FILE
        fresh = StudyRecord(
            command=tuple(self._arguments),
            working_folder=str(Path.cwd()),
            allow=tuple(sorted(self._space.allow)),
            started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        )
        if not path.exists():
            store.write_json(path, fresh)
            return fresh
        kept = store.read_record(path, StudyRecord)
        if (kept.command, kept.working_folder, kept.allow) != (fresh.command, fresh.working_folder, fresh.allow):
            raise UsageError(
                f"{self.folder.path} holds a study of another command: {' '.join(kept.command)}",
                "Choose another folder with --out.",
            )
        return kept

    def close(self) -> None:
        """End the study; its folder stays."""
        self._writer.close()
        remove_scratch(self._caches)

    @property
    def space(self) -> Space:
        """What may be tried, given what is known of the job so far."""
        return replace(
            self._space,
            workers_stay=is_unsplit_stream(self.record.loader),
            may_persist=self.record.data_set_changes is None and not self.record.made_each_epoch,
        )

    def run(self, budget_s: float, trying: Callable[[Attempt, float], None], tried: Callable[[Trial], None]) -> None:
        """Make trials until nothing is left to learn or the budget is spent. Ctrl-C is raised."""
        deadline = time.monotonic() + budget_s
        # Trials of a study that was stopped cannot be compared with those of a script that has changed since.
        file = changed_file(self.record, self._arguments) if self.trials else None
        if file is not None and next_step(self.trials, self.space, budget_s) is not None:
            raise UsageError(
                f"{file} has changed since the first of the {len(self.trials)} trials in {self.folder.path} was made",
                "Start a new study: choose another folder with --out.",
            )
        while True:
            left_s = deadline - time.monotonic()
            attempt = next_step(self.trials, self.space, left_s)
            if attempt is None:
                return
            limit_s = time_limit_s(self.trials, left_s, self._trial_limit_s)
            trial = self.measure(attempt, limit_s, partial(trying, attempt))
            if trial.state == "timed_out" and limit_s == left_s and self.trials:
                return  # the budget ended: it says nothing about these settings
            self.trials.append(trial)
            self._writer.write([trial])
            tried(trial)

    def measure(self, attempt: Attempt, limit_s: float, tick: Callable[[float], None]) -> Trial:
        """Run one trial; it is not yet saved."""
        name = f"trials/trial-{len(self.trials) + 1:03d}"
        while os.path.lexists(self.folder.path / name):
            name += "-again"  # an interrupted trial keeps its folder
        self.folder.make(name)
        folder = self.folder.path / name
        is_recipe = self._arguments[:2] == ["fulltilt", "train"]
        # Recipes take settings as flags; their --out is deleted with the trial.
        flags = [*recipe_flags(attempt.settings), "--fresh", "--out", SCRATCH] if is_recipe else []
        patience = self._patience
        if attempt.purpose == "search" and (best := best_of(self.trials)) is not None:
            patience = replace(patience, to_beat=OUT_OF_THE_RACE * rate(best))
        assignment = Assignment(
            settings=Settings() if is_recipe else attempt.settings,
            folder=str(folder),
            loader=self.record.loader,
            patience=patience,
        )
        record = RunRecord(
            name=folder.name,
            command=tuple(self._arguments),
            started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=describe_machine(self._gpus),
            fulltilt=__version__,
            asked=attempt.settings,
        )
        command = [*self._command, *flags]
        limits = limit_s, self._space.memory_bytes
        ended = run_trial(self._isolation, command, assignment, record, *limits, self._gpus, self._caches, tick)
        answer, run = Answer(), None
        with contextlib.suppress(RunFolderError):  # it ended before it had one
            answer = store.read_record(folder / ANSWER_FILE, Answer)
        try:
            run = store.load(folder)
        except FulltiltError as error:
            print(f"fulltilt: {error}", file=sys.stderr)
        trial = trial_record(attempt, ended, answer, run, start_of(self.trials), assignment.loader)
        if attempt.purpose == "start" and run is not None and run.ranks:
            self.record = learned(self.record, run, self._arguments)
            store.write_json(self.folder.path / STUDY_FILE, self.record)
        return replace(trial, folder=name)


# --------------------------------------------------------------------------- which trial, and for how long


def next_step(trials: Sequence[Trial], space: Space, left_s: float) -> Attempt | None:
    """The next trial, or None when the study is over: nothing left to try, or no time for it."""
    if start_of(trials) is None:
        return next_attempt(trials, space)  # nothing can be said without it, so it runs whatever time is left
    typical_s = fmean(trial.wall_s or 0.0 for trial in trials if is_valid(trial))
    to_verify_s = 2 * pairs_to_keep(trials) * typical_s
    attempt = next_attempt(trials, space) if left_s >= to_verify_s + typical_s else None
    if attempt is None and left_s >= typical_s:
        attempt = next_verification(trials)
    return attempt


def least_budget_s(trials: Sequence[Trial], space: Space, left_s: float) -> float | None:
    """The budget that a first answer needs, where too little is left after the start; else None.

    Too little means less than a candidate and one pair of trials that verifies it; most need two pairs.
    """
    start = start_of(trials)
    if start is None or start.wall_s is None or next_attempt(trials, space) is None:
        return None
    return (2 + 2 * LEAST_PAIRS) * start.wall_s if left_s < (1 + 2) * start.wall_s else None


def time_limit_s(trials: Sequence[Trial], left_s: float, asked_s: float | None) -> float:
    """How long the next trial may take: at most what is left of the budget."""
    start = start_of(trials)
    if asked_s is None and start is not None and start.wall_s is not None:
        asked_s = LIMIT_FACTOR * start.wall_s + LIMIT_MORE_S
    return left_s if asked_s is None else min(asked_s, left_s)


# --------------------------------------------------------------------------- what the first trial showed


def learned(record: StudyRecord, run: Run, arguments: Sequence[str]) -> StudyRecord:
    """The record with what the first trial showed about the job: its loader and its optimizer."""
    evidence = gather(run)
    loader = evidence.loader
    source, text, made_again = _source_of(loader, arguments), "", False
    if source is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = source.read_text(encoding="utf-8")
    if loader is not None and loader.made_by is None:
        line = int((loader.where or ":0").rpartition(":")[2])
        # By the source, too: a trial may end within an epoch.
        made_again = made_for_each_pass(loader) or is_made_in_a_loop(text, line)
    return replace(
        record,
        loader=loader,
        source_sha256=None if source is None else fingerprint(source),
        script_sha256=fingerprint(_script(arguments)),
        data_set_changes=changes_data_set(text),
        made_each_epoch=made_again,
        optimizer=next(iter(evidence.rank.optimizers), None),
        learning_rate=evidence.rank.learning_rate,
    )


def changed_file(record: StudyRecord, arguments: Sequence[str]) -> Path | None:
    """The script or the file that makes its loader, where it has changed since the first trial."""
    for file, then in (
        (_source_of(record.loader, arguments), record.source_sha256),
        (_script(arguments), record.script_sha256),
    ):
        if file is not None and then is not None and fingerprint(file) != then:
            return file
    return None


def _source_of(loader: LoaderRecord | None, arguments: Sequence[str]) -> Path | None:
    return None if loader is None or loader.where is None else source_file(loader.where, Path(), arguments)


def _script(arguments: Sequence[str]) -> Path:
    """The script in a command; the working folder where there is none."""
    return Path(next((argument for argument in arguments if argument.endswith(".py")), ""))
