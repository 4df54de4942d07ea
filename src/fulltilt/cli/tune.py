"""`fulltilt tune`: tries settings in short trials, verifies the best, writes a settings file and a diff."""

from __future__ import annotations

import math
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from fulltilt import store
from fulltilt.cli.streams import JOB_COMMAND, StatusBar, tell, tell_wrapped, warn_of_flags
from fulltilt.errors import Diverged, DoesNotFit, FulltiltError, MachineError, UsageError
from fulltilt.figures import count, duration_s, seconds
from fulltilt.probes.host import cpu_capacity, memory_headroom_bytes
from fulltilt.recipes import RECIPES
from fulltilt.recorder.job_command import job_command, job_name
from fulltilt.recorder.loaders.settings_file import LOADER
from fulltilt.records import Settings, Trial
from fulltilt.report.console import open_console
from fulltilt.store import SETTINGS_FILE, OwnedFolder
from fulltilt.tuning.search_space import (
    LOADER_SETTINGS,
    Attempt,
    Space,
    best_of,
    is_unsplit_stream,
    is_valid,
    loader_settings,
    parse_allow,
)
from fulltilt.tuning.solutions import (
    changing_data_set_sentence,
    in_words,
    manual_steps,
    rate_words,
    show_solutions,
    solutions,
    trial_line,
    verdict,
)
from fulltilt.tuning.source_edit import ManualChange, apply_change, propose
from fulltilt.tuning.study import Study, StudyRecord, least_budget_s, next_step
from fulltilt.tuning.trial.isolation import Isolation, choose
from fulltilt.tuning.verification import Comparison, winner

# Flags that a training script hardly has; after the script they are given to it.
OWN_FLAGS = ("--budget", "--allow", "--apply", "--trial-limit", "--in-place")
STOPPED_EARLY = 3
# The share of the memory free at the start that a trial may use before it is ended.
TRIAL_MEMORY = 0.9
DIFF_FILE = "change.diff"


EXAMPLES = (
    "fulltilt tune train.py --lr 0.1",
    "fulltilt tune --budget 5m --apply train.py   # write the winner into it",
    "fulltilt tune --allow batch,precision train.py",
    "fulltilt tune cod --data /data/COD10K-v3     # a recipe",
)
COMMAND = JOB_COMMAND


def tune(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT ARGS | -m MODULE ARGS | RECIPE ARGS", show_default=False, hidden=True),
    ] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time for all trials, such as 90s, 10m or 1h.")] = "10m",
    allow: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Also tune these: batch,accumulation,precision,compile."),
    ] = "",
    apply: Annotated[bool, typer.Option("--apply", help="Write the verified change into the source file.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Study folder; name it again to resume a study. [default: fulltilt-runs/…]"),
    ] = None,
    trial_limit: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time limit of one trial, such as 60s.")
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Run trials without isolation: they can change your files.")
    ] = False,
    module: Annotated[bool, typer.Option("-m", help="Tune a module, as python -m runs it.")] = False,
) -> None:
    """Try settings in short trials and verify the best one.

    Trials change none of your files. The best settings are measured again, in turns with yours, then written
    to settings.json (for fulltilt run --settings) and as a diff of the DataLoader call.
    """
    arguments = (["-m"] if module else []) + list(command or [])
    if not arguments:
        raise UsageError("nothing to tune", "Give a script: fulltilt tune train.py ARGS")
    arguments = with_recipe_command(arguments)
    # A recipe runs in this Fulltilt, whatever is on the user's PATH.
    resolved = job_command(["-m", *arguments] if _is_recipe(arguments) else arguments)
    budget_s = seconds_of("--budget", budget)
    trial_limit_s = None if trial_limit is None else seconds_of("--trial-limit", trial_limit)
    allowed = parse_allow(allow)
    warn_of_flags("tune", OWN_FLAGS, arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: temporary files are deleted on the way out
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    isolation, reasons = choose(in_place)
    if isolation is None:
        raise MachineError(
            f"this system cannot isolate trials from your files: {'; '.join(reasons)}",
            "Tune in a copy of your folder with --in-place: the script then really writes and deletes.",
        )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", job_name(arguments[2:] if _is_recipe(arguments) else arguments))
    folder = out or Path("fulltilt-runs") / f"{datetime.now():%Y%m%d-%H%M%S}-tune-{name[:60]}"
    raise typer.Exit(run_study(arguments, resolved, folder, allowed, isolation, budget_s, trial_limit_s, apply))


def with_recipe_command(arguments: list[str]) -> list[str]:
    """`cod ARGS` is `fulltilt train cod ARGS`, unless a script has that name."""
    name = Path(arguments[0])
    is_script = name.is_file() or (name / "__main__.py").exists()
    return ["fulltilt", "train", *arguments] if arguments[0] in RECIPES and not is_script else arguments


def seconds_of(flag: str, text: str) -> float:
    """A duration such as ``90s``, ``10m`` or ``1h30m`` in seconds. Raises UsageError naming the flag."""
    seconds = duration_s(text)
    if not seconds:
        raise UsageError(f"{flag} {text} is not a duration", "Write it like 90s, 10m or 1h30m.")
    return seconds


def _is_recipe(arguments: list[str]) -> bool:
    return arguments[:2] == ["fulltilt", "train"]


# --------------------------------------------------------------------------- the study as the terminal shows it


def run_study(
    arguments: list[str],
    command: list[str],
    folder: Path,
    allow: frozenset[str],
    isolation: Isolation,
    budget_s: float,
    trial_limit_s: float | None,
    apply: bool,
) -> int:
    """Run a study and print its result. Returns 0, or 3 when it was stopped early; raises when nothing was measured."""
    space = Space(cpu_capacity().usable, allow, int(TRIAL_MEMORY * memory_headroom_bytes()))
    bar = StatusBar(sys.stderr)
    ends_s = time.monotonic() + budget_s
    study = Study(arguments, command, folder, space, isolation, trial_limit_s, _say)
    _say(isolation.sentence)
    if study.trials:
        _say(f"resuming the study in {folder}, which has {count('trial', len(study.trials))}")

    def trying(attempt: Attempt, wall_s: float) -> None:
        if bar.on:
            best = best_of(study.trials)
            so_far = "" if best is None else f" · best so far {rate_words(best)} samples/s"
            what = "the script" if attempt.settings == Settings() else in_words(attempt.settings)
            # The reason last: a narrow terminal cuts it off.
            bar.show(f"fulltilt tune · {what} · {seconds(wall_s)}{so_far} · {attempt.why}")

    def tried(trial: Trial) -> None:
        _say(trial_line(len(study.trials), trial, best_of(study.trials)))
        left_s = ends_s - time.monotonic()
        if trial.purpose == "start" and (needed_s := least_budget_s(study.trials, study.space, left_s)) is not None:
            _say(
                f"this trial took {seconds(trial.wall_s)}; the {seconds(max(left_s, 0.0))} left of the budget are "
                f"too short to verify a change: use --budget {math.ceil(needed_s / 60)}m (what is tried now is kept)"
            )

    stopped = False
    try:
        with study.folder.locked(f"another study runs in {folder}"):
            study.run(budget_s, trying, tried)
    except KeyboardInterrupt:
        stopped = True
    finally:
        bar.close()
        study.close()
    if stopped or next_step(study.trials, study.space, math.inf) is not None:
        why = "stopped" if stopped else "the budget ended before everything was tried"
        allowed = ["--allow", ",".join(sorted(allow))] if allow else []
        allowed += ["--in-place"] if isolation.kind == "none" else []
        allowed += ["--apply"] if apply else []
        again = shlex.join(["fulltilt", "tune", "--out", str(folder), *allowed, *arguments])
        kept = "finished trials are kept" if study.trials else "no trial has finished yet"
        _say(f"{why}; {kept}. To resume:")
        tell(f"  {again}")
    if stopped and not study.trials:
        return STOPPED_EARLY
    end_study(study.record, study.trials, folder, apply, stopped)
    return STOPPED_EARLY if stopped else 0


def _say(text: str) -> None:
    tell_wrapped(f"fulltilt: {text}")


# --------------------------------------------------------------------------- how it ended


def end_study(record: StudyRecord, trials: Sequence[Trial], folder: Path, apply: bool, stopped: bool = False) -> None:
    """Print what a study found and write its files. Raises when the unchanged script could not be measured.

    ``stopped``: by the user, before the study had ended.
    """
    console = open_console(goes_on=True)
    won = show_study(console, record, trials, folder, stopped)
    for name in (SETTINGS_FILE, DIFF_FILE):
        OwnedFolder(folder.absolute()).remove(name)  # of an earlier answer
    if won is not None:
        in_force = next(trial.in_force for trial in trials if is_valid(trial) and trial.settings == won.candidate)
        _write_winner(console, record, won.candidate, in_force, folder, apply)
    elif apply:
        console.print(Text("--apply: nothing was written, since no change was verified."))


def show_study(
    console: Console, record: StudyRecord, trials: Sequence[Trial], folder: Path, stopped: bool = False
) -> Comparison | None:
    """Print the solutions and what was verified. Returns the winner; raises as `end_study` does."""
    found = [trial for trial in trials if is_valid(trial)]
    if not found:
        raise _nothing_measured(trials, folder)
    won = winner(trials)
    show_solutions(console, solutions(trials, record), won.candidate if won is not None else None)
    if (in_parts := next((trial for trial in found if trial.settings.accumulation), None)) is not None:
        for line in manual_steps(in_parts.settings):
            console.print(Text(line))
    console.print(Text(verdict(trials, is_unsplit_stream(record.loader), stopped)))
    if record.data_set_changes is not None and record.loader is not None:
        file = (record.loader.where or "").rpartition(":")[0]
        console.print(Text(changing_data_set_sentence(f"{file}:{record.data_set_changes}")))
    return won


def _write_winner(
    console: Console, record: StudyRecord, settings: Settings, in_force: Settings, folder: Path, apply: bool
) -> None:
    settings_for = {LOADER: record.loader.where} if record.loader is not None and record.loader.where else {}
    store.write_json(folder / SETTINGS_FILE, {**store.encode(loader_settings(in_force)), **settings_for})
    if record.loader is None or record.loader.made_by != "fulltilt":
        again = shlex.join(["fulltilt", "run", "--settings", str(folder / SETTINGS_FILE), *record.command])
        rest = replace(settings, **dict.fromkeys(LOADER_SETTINGS))
        only = "" if rest == Settings() else f", the loader's part alone, not {in_words(rest)}"
        console.print(Text(f"Without a change to the script{only}: {again}"), soft_wrap=True)  # a command to copy
    for line in manual_steps(settings):
        console.print(Text(line))
    with_batch = settings.batch_size is not None
    change = propose(record.loader, in_force, Path(record.working_folder), record.command, with_batch)
    if isinstance(change, ManualChange):
        console.print(Text(f"No diff: {change.why}. Write: {change.write}"))
        return
    if change.new == change.old:
        console.print(Text(f"{change.path} has these settings already; nothing is left to write."))
        return
    store.write_text(folder / DIFF_FILE, change.diff)
    console.print(Text(change.diff), soft_wrap=True)  # a wrapped line is no diff
    for remark in change.remarks:
        console.print(Text(f"Note: {remark}."))
    files = [str(change.path), str(folder / DIFF_FILE)]
    if apply:
        apply_change(change, record.source_sha256)
        back = shlex.join(["patch", "-R", *files])
        console.print(Text(f"Written into {change.path}; take it back with: {back}"), soft_wrap=True)
    else:
        # Not with --apply: that would resume the study, or start a new one, and may write another change.
        write = shlex.join(["patch", *files])
        console.print(Text(f"The diff is in {folder / DIFF_FILE}; write it with: {write}"), soft_wrap=True)


def _nothing_measured(trials: Sequence[Trial], folder: Path) -> FulltiltError:
    if not trials:
        return UsageError("no trial has finished", "Give it more time: --budget 10m")
    last = trials[-1]
    where = f"Its output is in {folder / (last.folder or '')}/output.txt"
    what = f"the unchanged script could not be measured: {last.note or last.state}"
    if last.state == "timed_out":
        return UsageError(what, f"Give it more time with --budget, and with --trial-limit where you set it. {where}")
    if last.state == "oom":
        return DoesNotFit(what, f"Try smaller parts of the same batch: --allow batch,accumulation. {where}")
    if last.state == "diverged":
        return Diverged(what, where)
    return UsageError(what, where)
