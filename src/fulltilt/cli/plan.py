"""`fulltilt plan`: from a run to the next one, on this GPU and on others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulltilt import figures, store
from fulltilt.diagnosis.forecast import Forecast, forecast
from fulltilt.errors import UsageError
from fulltilt.records import SCHEMA_VERSION
from fulltilt.report.console import open_console
from fulltilt.tuning.gpu_models import GPU_MODELS, find_gpu
from fulltilt.tuning.learning_rate import WARM_UP, figure
from fulltilt.tuning.memory_line import USABLE_VRAM
from fulltilt.tuning.plan import (
    CONTEXT_BYTES,
    GpuCandidate,
    History,
    Hours,
    Plan,
    Target,
    VramBudget,
    make_plan,
    parse_target,
    read_history,
    with_target,
)


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
    show(console, made)
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


# --------------------------------------------------------------------------- the plan on the terminal


def show(console: Console, plan: Plan) -> None:
    """Everything that the plan says."""
    console.print(Text(_headline(plan)))
    if plan.vram is not None:
        _show_vram(console, plan, plan.vram)
    if plan.batches:
        _show_batches(console, plan)
    if plan.loading:
        _show_loading(console, plan)
    if plan.gpus:
        _show_gpus(console, plan)
    for lack in plan.lacks:
        console.print(Text(f"\nnot known: {lack}"))


def _headline(plan: Plan) -> str:
    parts = [plan.gpu or "no GPU"]
    if plan.batch is not None:
        parts.append(f"batch {plan.batch}")
    if plan.samples_per_s is not None:
        parts.append(f"{figures.number(plan.samples_per_s)} samples/s")
    if plan.compute_samples_per_s is not None:
        parts.append(f"the GPU could take {figures.number(plan.compute_samples_per_s)}")
    if plan.loader_samples_per_s is not None:
        parts.append(f"the loader could give {figures.number(plan.loader_samples_per_s)}")
    return ", ".join(parts)


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="bold")
    for name in (*left, *right):
        table.add_column(name, justify="left" if name in left else "right")
    return table


def _show_vram(console: Console, plan: Plan, budget: VramBudget) -> None:
    table = _table("\nGPU memory by part", ("part",), ("bytes",))
    table.add_row("weights", figures.size(budget.weights_bytes))
    table.add_row("gradients", figures.size(budget.gradients_bytes))
    table.add_row("optimizer", figures.size(budget.optimizer_bytes))
    table.add_row("all else that stays", figures.size(budget.other_bytes))
    table.add_row("a step, whatever the batch", figures.size(budget.workspace_bytes))
    table.add_row("activations, each sample", figures.size(round(budget.activations_bytes_per_sample)))
    if plan.batch is not None:
        table.add_row(f"together at batch {plan.batch}", figures.size(budget.needed_bytes(plan.batch)))
    table.add_row("CUDA itself", figures.size(CONTEXT_BYTES))
    console.print(table)
    if plan.largest_batch is not None:
        reserve = f"{100 * (1 - USABLE_VRAM):.0f} % of the GPU kept free"
        console.print(Text(f"the largest batch that fits: {plan.largest_batch} ({reserve})"))


def _show_batches(console: Console, plan: Plan) -> None:
    table = _table("\nBatch sizes on this GPU", (), ("batch", "VRAM", "of it", "samples/s", "LR", "hours to target"))
    for row in plan.batches:
        table.add_row(
            str(row.batch),
            figures.size(row.vram_bytes),
            figures.percent(row.vram_share),
            figures.number(row.samples_per_s) if row.samples_per_s is not None else figures.NOT_MEASURED,
            figures.NOT_MEASURED if row.learning_rate is None else figure(row.learning_rate.rate),
            _hours(row.hours),
        )
    console.print(table)
    for row in plan.batches[1:]:
        if row.learning_rate is not None:
            console.print(Text(f"batch {row.batch}: learning rate {row.learning_rate.arithmetic}"))
    much_higher = [row.batch for row in plan.batches if row.learning_rate is not None and row.learning_rate.warm_up]
    if much_higher:
        console.print(Text(f"from batch {min(much_higher)} on the rate is much higher: {WARM_UP}"))


def _show_loading(console: Console, plan: Plan) -> None:
    whose = f" in each of {plan.ranks} processes" if plan.ranks > 1 else ""
    table = _table(
        f"\nWhat workers hold{whose}", (), ("workers", "their RAM", "batches ahead", "bytes ahead", "lasts", "fits")
    )
    for row in plan.loading:
        table.add_row(
            str(row.workers),
            figures.size(row.workers_bytes),
            str(row.queued_batches),
            figures.size(row.queued_bytes),
            figures.seconds(row.buffer_s) if row.queued_batches else figures.NOT_MEASURED,
            figures.NOT_MEASURED if row.fits is None else "yes" if row.fits else "no",
        )
    console.print(table)


def _show_gpus(console: Console, plan: Plan) -> None:
    table = _table(
        "\nOther GPUs (compute ceiling by data sheet)",
        ("GPU",),
        ("memory", "largest batch", *_as_here(plan), "samples/s", "from", "to", "precision", "hours to target"),
    )
    for row in plan.gpus:
        parts = (_parts(row),) if _as_here(plan) else ()
        table.add_row(row.gpu, f"{row.memory_gib:g} GiB", _largest(row), *parts, *_speed(row), _hours(row.hours))
    console.print(table)
    if _as_here(plan):
        said = "parts × samples: the gradients of the parts are added up before each optimizer step"
        console.print(Text(f"{said}; to a contrastive loss that is no larger batch"))


def _as_here(plan: Plan) -> tuple[str, ...]:
    """The column for what keeps the run's batch elsewhere; there is none where it fits everywhere."""
    return (f"batch {plan.batch} as",) if any(row.accumulation for row in plan.gpus) else ()


def _parts(row: GpuCandidate) -> str:
    if row.accumulation is None:
        return "whole" if row.fits else figures.NOT_MEASURED
    return " × ".join(map(str, row.accumulation))


def _largest(row: GpuCandidate) -> str:
    if row.largest_batch is None:
        return figures.NOT_MEASURED
    return "does not fit" if row.largest_batch == 0 else str(row.largest_batch)


def _speed(row: GpuCandidate) -> tuple[str, str, str, str]:
    if row.speed is None or row.largest_batch == 0:
        return (figures.NOT_MEASURED,) * 4
    rates = (figures.number(rate) for rate in (row.speed.likely, row.speed.low, row.speed.high))
    likely, low, high = rates
    return likely, low, high, row.speed.precision


def _hours(hours: Hours | None) -> str:
    if hours is None:
        return figures.NOT_MEASURED
    low, high = (f"{value:.1f}" for value in hours)
    return low if low == high else f"{low} to {high}"
