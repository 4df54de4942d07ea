"""`fulltilt plan`: from a run to the next one, on this GPU and on others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fulltilt import store
from fulltilt.diagnosis.forecast import Forecast, forecast
from fulltilt.errors import UsageError
from fulltilt.records import SCHEMA_VERSION
from fulltilt.report.screen import open_console
from fulltilt.tuning.plan import view
from fulltilt.tuning.plan.gpu_models import GPU_MODELS, find_gpu
from fulltilt.tuning.plan.plan import Plan, make_plan, with_target
from fulltilt.tuning.plan.target import History, Target, parse_target, read_history


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("plan")(plan)


def plan(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]...", help="A run; more at other batch sizes.")],
    target: Annotated[
        str | None, typer.Option(metavar="METRIC=VALUE", help="How long until then, from the run's history.")
    ] = None,
    gpu: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these GPUs; may be repeated.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Plan from a run: GPU memory by part, batch sizes, learning rates, workers' RAM, other GPUs, time to a target."""
    wanted = None if target is None else parse_target(target)
    models = None if not gpu else {_model(name) for name in gpu}
    made = make_plan([store.load(folder) for folder in runs])
    if models is not None:
        made = dataclasses.replace(made, gpus=tuple(row for row in made.gpus if row.gpu in models))
    outlook = None if wanted is None else _outlook(wanted, runs)
    if outlook is not None and outlook.hours is not None and made.samples_per_s:
        made = with_target(made, outlook.hours, made.samples_per_s)
    if json_:
        _print_json(made, wanted, outlook)
        return
    console = open_console()
    view.show(console, made)
    if wanted is not None and outlook is not None:
        print(f"\n{wanted.metric}: {outlook.sentence}")


def _model(name: str) -> str:
    found = find_gpu(name)
    if found is None:
        raise UsageError(f"--gpu {name}: not in the table", f"There are: {', '.join(m.name for m in GPU_MODELS)}")
    return found.name


def _outlook(target: Target, runs: list[Path]) -> Forecast:
    beside = [folder for run in runs for folder in (run, *run.resolve().parents[:2])]
    history: History = read_history(beside, target.metric)
    return forecast(history.points, target.value, history.epoch_s, target.mode)


def _print_json(made: Plan, target: Target | None, outlook: Forecast | None) -> None:
    plain: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(made)}
    plain["target"] = None if target is None else dataclasses.asdict(target)
    plain["forecast"] = None if outlook is None else dataclasses.asdict(outlook)
    print(json.dumps(plain, indent=2, allow_nan=False, default=str))
