"""The end of `fulltilt tune`: the table, what was verified, the settings file, and the change of the source."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fulltilt import store
from fulltilt.errors import Diverged, DoesNotFit, FulltiltError, MachineError, UsageError
from fulltilt.recorder.overrides import LOADER
from fulltilt.records import Settings, Trial
from fulltilt.report.screen import open_console
from fulltilt.tuning.learning_rate import CONTRASTIVE_WARNING, looks_contrastive, looks_deeply_supervised
from fulltilt.tuning.solutions import by_hand, in_words, solutions
from fulltilt.tuning.source_patch import WriteYourself, apply_change, propose
from fulltilt.tuning.space import LOADER_SETTINGS, loader_settings, rid_of_none, streams_alone
from fulltilt.tuning.study_record import StudyRecord
from fulltilt.tuning.table import (
    OVERLAPPING_PASSES,
    changing_data_set_sentence,
    nothing_tried_sentence,
    nothing_worked_sentence,
    show_arithmetic,
    show_solutions,
    show_trials,
    verdict_sentence,
    workers_stay_sentence,
)
from fulltilt.tuning.trials import is_valid
from fulltilt.tuning.verify import candidates, compare, winner

SETTINGS_FILE = "settings.json"
DIFF_FILE = "change.diff"


def end_study(record: StudyRecord, trials: Sequence[Trial], folder: Path, apply: bool, stopped: bool = False) -> None:
    """Print what a study found and write its files. Raises when the script as it is could not be measured.

    ``stopped``: by the user, before it was through.
    """
    console = open_console(goes_on=True)
    if trials:
        show_trials(console, trials)
        console.print()
    found = [trial for trial in trials if is_valid(trial)]
    if not found:
        raise _nothing_measured(trials, folder)
    rows = solutions(
        trials,
        record.optimizer,
        record.learning_rate,
        looks_deeply_supervised(record.command),
        streams=record.loader is not None and record.loader.iterable,
    )
    show_solutions(console, rows)
    console.print()
    show_arithmetic(console, rows)
    if any(trial.settings.accumulation for trial in found) and looks_contrastive(_source(record)):
        console.print(Text(CONTRASTIVE_WARNING))
    won = winner(trials)
    tested = [comparison for candidate in candidates(trials) if (comparison := compare(trials, candidate))]
    looked_faster = next(iter(candidates(trials)), None)
    best = won or (tested[0] if tested else None)
    nothing_else = nothing_tried_sentence(trials, stopped) or nothing_worked_sentence(trials)
    verdict = nothing_else or verdict_sentence(best, looked_faster, stopped)
    if streams_alone(record.loader) and (sentence := workers_stay_sentence(trials)) is not None:
        verdict = sentence if nothing_tried_sentence(trials) else f"{verdict} {sentence}"
    console.print(Text(verdict))
    if record.data_set_changes is not None and record.loader is not None:
        file = (record.loader.where or "").rpartition(":")[0]
        console.print(Text(changing_data_set_sentence(f"{file}:{record.data_set_changes}")))
    elif record.passes_overlap:
        console.print(Text(OVERLAPPING_PASSES))
    for name in (SETTINGS_FILE, DIFF_FILE):
        (folder / name).unlink(missing_ok=True)  # of an earlier answer
    if won is not None:
        in_force = next(trial.in_force for trial in found if trial.settings == won.candidate)
        _hand_over(console, record, won.candidate, in_force, folder, apply)
    elif apply:
        console.print(Text("--apply: there is no verified change, so nothing was written."))


def _hand_over(
    console: Console, record: StudyRecord, settings: Settings, in_force: Settings, folder: Path, apply: bool
) -> None:
    """The winner as a settings file and as a change of the source."""
    settings_for = {LOADER: record.loader.where} if record.loader is not None and record.loader.where else {}
    store.write_json(folder / SETTINGS_FILE, {**rid_of_none(loader_settings(in_force)), **settings_for})
    if record.loader is None or record.loader.made_by != "fulltilt":
        again = shlex.join(["fulltilt", "run", "--settings", str(folder / SETTINGS_FILE), *record.command])
        rest = replace(settings, **dict.fromkeys(LOADER_SETTINGS))
        only = "" if rest == Settings() else f", the loader's part alone, not {in_words(rest)}"
        console.print(Text(f"Without a change to the script{only}: {again}"), soft_wrap=True)  # to be copied as it is
    for line in by_hand(settings):
        console.print(Text(line))
    try:
        change = propose(
            record.loader,
            in_force,
            Path(record.working_folder),
            record.command,
            with_batch=settings.batch_size is not None,
        )
    except MachineError as error:  # libcst is not there
        console.print(Text(str(error)))
        return
    if isinstance(change, WriteYourself):
        console.print(Text(f"No diff: {change.why}. Write: {change.write}"))
        return
    if change.new == change.old:
        console.print(Text(f"{change.path} has these settings already; nothing is left to write."))
        return
    store.write_text(folder / DIFF_FILE, change.diff, change.encoding)
    console.print(Text(change.diff), soft_wrap=True)  # a wrapped line is no diff
    for remark in change.remarks:
        console.print(Text(f"Note: {remark}."))
    files = [str(change.path), str(folder / DIFF_FILE)]
    if apply:
        apply_change(change, record.source_sha256)
        back = shlex.join(["patch", "-R", *files])
        console.print(Text(f"Written into {change.path}; take it back with: {back}"), soft_wrap=True)
    else:
        # Not by --apply: the study would go on, or begin anew, and may write another one.
        write = shlex.join(["patch", *files])
        console.print(Text(f"The diff is in {folder / DIFF_FILE}; write it with: {write}"), soft_wrap=True)


def _nothing_measured(trials: Sequence[Trial], folder: Path) -> FulltiltError:
    if not trials:
        return UsageError("no trial was made", "Give it more time: --budget 10m")
    last = trials[-1]
    where = f"Its output is in {folder / (last.folder or '')}/output.txt"
    what = f"the script as it is could not be measured: {last.note or last.state}"
    if "EOFError" in (last.note or ""):
        return UsageError(f"{what}: a trial has no standard input", f"Let the script take it from an argument. {where}")
    if last.state == "timed_out":
        return UsageError(what, f"Give it more time with --budget, and with --trial-limit where you set it. {where}")
    if last.state == "oom":
        return DoesNotFit(what, f"Try smaller parts of the same batch: --allow batch,accumulation. {where}")
    if last.state == "diverged":
        return Diverged(what, where)
    return UsageError(what, where)


def _source(record: StudyRecord) -> str:
    """The text of the scripts that the command names."""
    text = ""
    for argument in record.command:
        if argument.endswith(".py"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                text += (Path(record.working_folder) / argument).read_text(encoding="utf-8")
    return text
