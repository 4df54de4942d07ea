"""`fulltilt tune`: trials of a script, verified, with a settings file and a diff of its source."""

from __future__ import annotations

import itertools
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fulltilt import store
from fulltilt.cli.own_flags import given_to_script, hint
from fulltilt.errors import UsageError
from fulltilt.recipes import RECIPES
from fulltilt.recorder.launch import job_command, job_name
from fulltilt.train.config import duration_s

# Flags that no training script is likely to have; behind the script they are given to it.
OWN_FLAGS = ("--budget", "--allow", "--apply", "--trial-limit")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "tune",
        context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
        options_metavar="[OPTIONS] [--]",
    )(tune)


def tune(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT.py ARGS | -m MODULE ARGS | RECIPE ARGS", show_default=False),
    ] = None,
    budget: Annotated[str, typer.Option(help="Time for all trials together, such as 90s, 10m or 1h.")] = "10m",
    allow: Annotated[
        str,
        typer.Option(help="What may change besides the loader: batch,accumulation,precision,compile.", metavar="NAMES"),
    ] = "",
    apply: Annotated[bool, typer.Option("--apply", help="Write the verified change into the source.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Study folder; one that was stopped goes on. [default: fulltilt-runs/<date>-…]")
    ] = None,
    trial_limit: Annotated[str | None, typer.Option(help="Longest time of one trial, such as 60s.")] = None,
    module: Annotated[bool, typer.Option("-m", help="Study a module, as python -m runs it.")] = False,
) -> None:
    """Try settings of a training job in short trials, verify the best, and say what to write."""
    arguments = (["-m"] if module else []) + list(command or [])
    if not arguments:
        raise UsageError("nothing to tune", "Give a script: fulltilt tune train.py ARGS")
    arguments = named_in_full(arguments)
    # A recipe is of this Fulltilt, wherever the user's PATH leads.
    resolved = job_command(["-m", *arguments] if _is_recipe(arguments) else arguments)
    refuse_unguarded(resolved)
    budget_s = seconds_of("--budget", budget)
    trial_limit_s = None if trial_limit is None else seconds_of("--trial-limit", trial_limit)
    from fulltilt.tuning.space import parse_allow

    allowed = parse_allow(allow)
    for flag in given_to_script(OWN_FLAGS, arguments):
        print(f"fulltilt: {hint('tune', flag)}", file=sys.stderr)
    folder = store.create_folder(out or _new_folder(_name(arguments)))
    from fulltilt.cli.studying import conduct

    raise typer.Exit(conduct(arguments, resolved, folder, allowed, budget_s, trial_limit_s, apply))


def named_in_full(arguments: list[str]) -> list[str]:
    """`cod ARGS` is `fulltilt train cod ARGS`, unless a script has that name."""
    name = Path(arguments[0])
    is_script = name.is_file() or (name / "__main__.py").exists()
    return ["fulltilt", "train", *arguments] if arguments[0] in RECIPES and not is_script else arguments


def refuse_unguarded(command: list[str]) -> None:
    """Raises UsageError for an interpreter that would run a trial without its guards over the user's files."""
    if not Path(command[0]).name.startswith("python"):
        return
    for flag in itertools.takewhile(lambda word: word.startswith("-") and word not in ("-m", "-c"), command[1:]):
        if not flag.startswith("--") and set(flag[1:].partition("X")[0].partition("W")[0]) & set("IES"):
            raise UsageError(
                f"a trial cannot keep your files from a script that runs with python {flag}",
                "Tune it without that flag: it shuts out what Fulltilt puts around a script.",
            )


def seconds_of(flag: str, text: str) -> float:
    """A duration such as ``90s``, ``10m`` or ``1h30m`` in seconds. Raises UsageError naming the flag."""
    seconds = duration_s(text)
    if not seconds:
        raise UsageError(f"{flag} {text} is not a duration", "Write it like 90s, 10m or 1h30m.")
    return seconds


def _is_recipe(arguments: list[str]) -> bool:
    return arguments[:2] == ["fulltilt", "train"]


def _name(arguments: list[str]) -> str:
    return job_name(arguments[2:] if _is_recipe(arguments) else arguments)


def _new_folder(name: str) -> Path:
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-tune-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)[:60]}"
    return Path("fulltilt-runs") / stem
