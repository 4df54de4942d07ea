"""`fulltilt plan`: what a run says about the next one, on this GPU and on others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulltilt import store
from fulltilt.cli.report import RUNS_FOLDER
from fulltilt.diagnosis.metric_forecast import forecast
from fulltilt.errors import UsageError
from fulltilt.figures import NOT_MEASURED, number, percent, seconds, size
from fulltilt.records import SCHEMA_VERSION
from fulltilt.report.console import open_console
from fulltilt.tuning.learning_rate import WARM_UP
from fulltilt.tuning.plan import (
    CONTEXT_BYTES,
    GPU_GIB,
    Hours,
    Plan,
    find_gpus,
    make_plan,
    parse_target,
    read_history,
    with_target,
)
from fulltilt.tuning.search_space import USABLE_VRAM

EXAMPLES = (
    "fulltilt plan                           # from the newest run",
    "fulltilt plan runs/b8 runs/b16          # what grows with the batch",
    "fulltilt plan runs/b8 --gpu 4090 --gpu A100",
    "fulltilt plan out/cod --target iou=0.75",
)


def plan(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Run folders at different batch sizes; without one, the newest run."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="METRIC=VALUE", help="Forecast when a metric gets there, from its history.")
    ] = None,
    gpu: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these GPUs; may be repeated.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Estimate from a run which batch sizes and GPUs would fit.

    Shows GPU memory by part, batch sizes with their learning rates, the workers' memory, other GPUs, and
    with --target the time until a metric is reached.
    """
    wanted = None if target is None else parse_target(target)
    names = {found for name in gpu or () for found in _gpus_named(name)}
    folders = runs or [store.newest_run(RUNS_FOLDER)]
    made = make_plan([store.load(folder) for folder in folders])
    if names:
        made = dataclasses.replace(made, gpus=tuple(row for row in made.gpus if row.gpu in names))
    outlook = None
    if wanted is not None:
        beside = [folder for run in folders for folder in (run, *run.resolve().parents[:2])]
        points, epoch_s = read_history(beside, wanted.metric)
        outlook = forecast(points, wanted.value, epoch_s, wanted.mode)
        if outlook.hours is not None and made.samples_per_s:
            made = with_target(made, outlook.hours, made.samples_per_s)
    if json_:
        plain: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(made)}
        plain["target"] = None if wanted is None else dataclasses.asdict(wanted)
        plain["forecast"] = None if outlook is None else dataclasses.asdict(outlook)
        print(json.dumps(plain, indent=2, allow_nan=False, default=str))
        return
    show(open_console(), made)
    if wanted is not None and outlook is not None:
        print(f"\n{wanted.metric}: {outlook.sentence}")


def _gpus_named(name: str) -> list[str]:
    found = find_gpus(name)
    if not found:
        raise UsageError(f"--gpu {name}: not in the table", f"There are: {', '.join(GPU_GIB)}")
    return found


# --------------------------------------------------------------------------- the plan on the terminal


def show(console: Console, plan: Plan) -> None:
    """Everything that the plan says."""
    parts = [plan.gpu or "no GPU"]
    parts += [] if plan.batch is None else [f"batch {plan.batch}"]
    parts += [] if plan.samples_per_s is None else [f"{number(plan.samples_per_s)} samples/s"]
    for what, rate in (
        ("the GPU could take", plan.compute_samples_per_s),
        ("the loader could give", plan.loader_samples_per_s),
    ):
        parts += [] if rate is None else [f"{what} {number(rate)}"]
    console.print(Text(", ".join(parts)))
    if plan.vram is not None:
        _show_vram(console, plan)
    if plan.batches:
        _show_batches(console, plan)
    if plan.loading:
        whose = f" in each of {plan.ranks} processes" if plan.ranks > 1 else ""
        columns = ("workers", "their RAM", "batches ahead", "bytes ahead", "lasts", "fits")
        rows = (
            (
                str(row.workers),
                size(row.workers_bytes),
                str(row.queued_batches),
                size(row.queued_bytes),
                seconds(row.buffer_s) if row.queued_batches else NOT_MEASURED,
                NOT_MEASURED if row.fits is None else "yes" if row.fits else "no",
            )
            for row in plan.loading
        )
        _table(console, f"\nWhat workers hold{whose}", columns, rows)
    if plan.gpus:
        _show_gpus(console, plan)
    for lack in plan.lacks:
        console.print(Text(f"\nnot known: {lack}"))


def _table(console: Console, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in ("part", "GPU") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _show_vram(console: Console, plan: Plan) -> None:
    budget = plan.vram
    assert budget is not None
    parts = {
        "weights": budget.weights_bytes,
        "gradients": budget.gradients_bytes,
        "optimizer": budget.optimizer_bytes,
        "all else that stays": budget.other_bytes,
        "a step, whatever the batch": budget.workspace_bytes,
        "activations, each sample": round(budget.activations_bytes_per_sample),
        **({} if plan.batch is None else {f"together at batch {plan.batch}": budget.needed_bytes(plan.batch)}),
        "CUDA itself": CONTEXT_BYTES,
    }
    rows = ((part, size(held)) for part, held in parts.items())
    _table(console, "\nGPU memory by part", ("part", "bytes"), rows)
    if plan.largest_batch is not None:
        reserve = f"{100 * (1 - USABLE_VRAM):.0f} % of the GPU kept free"
        console.print(Text(f"the largest batch that fits: {plan.largest_batch} ({reserve})"))


def _show_batches(console: Console, plan: Plan) -> None:
    rows = (
        (
            str(row.batch),
            size(row.vram_bytes),
            percent(row.vram_share),
            number(row.samples_per_s),
            NOT_MEASURED if row.learning_rate is None else f"{row.learning_rate.rate:.3g}",
            _hours(row.hours),
        )
        for row in plan.batches
    )
    columns = ("batch", "VRAM", "of it", "samples/s", "LR", "hours to target")
    _table(console, "\nBatch sizes on this GPU", columns, rows)
    for row in plan.batches[1:]:
        if row.learning_rate is not None:
            console.print(Text(f"batch {row.batch}: learning rate {row.learning_rate.arithmetic}"))
    much_higher = [row.batch for row in plan.batches if row.learning_rate is not None and row.learning_rate.warm_up]
    if much_higher:
        console.print(Text(f"from batch {min(much_higher)} on the rate is much higher: {WARM_UP}"))


def _show_gpus(console: Console, plan: Plan) -> None:
    # A column for what keeps the run's batch elsewhere, unless it fits everywhere.
    in_parts = any(row.accumulation for row in plan.gpus)
    columns = ("GPU", "memory", "largest batch", *([f"batch {plan.batch} as"] if in_parts else []))
    rows = []
    for row in plan.gpus:
        largest = {None: NOT_MEASURED, 0: "does not fit"}.get(row.largest_batch, str(row.largest_batch))
        whole = "whole" if row.fits else NOT_MEASURED
        parts = whole if row.accumulation is None else " × ".join(map(str, row.accumulation))
        rows.append([row.gpu, f"{row.memory_gib:g} GiB", largest, *([parts] if in_parts else [])])
    _table(console, "\nOther GPUs, by their memory", columns, rows)
    if in_parts:
        said = "parts × samples: the gradients of the parts are added up before each optimizer step"
        console.print(Text(f"{said}; to a contrastive loss that is no larger batch"))


def _hours(hours: Hours | None) -> str:
    if hours is None:
        return NOT_MEASURED
    low, high = (f"{value:.1f}" for value in hours)
    return low if low == high else f"{low} to {high}"
