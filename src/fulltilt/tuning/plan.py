"""Plans the next run from one run, or from several at different batch sizes. Pure functions over runs.

Covers GPU memory by part, the batch sizes that fit into this and other GPUs, the memory of workers and their queue, and
the history of a metric, for the time to a target.
"""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fulltilt.diagnosis import answer
from fulltilt.diagnosis.evidence import training_loaders
from fulltilt.errors import RunFolderError, UsageError
from fulltilt.records import GpuReading, Run
from fulltilt.store import read_json
from fulltilt.tuning.learning_rate import ScaledRate, accumulation_for, scale, uses_deep_supervision
from fulltilt.tuning.search_space import DEFAULT_PREFETCH, USABLE_VRAM, fit_line

Hours = tuple[float, float]
Points = tuple[tuple[float, float], ...]

# Of a single step the time is not known: recording begins at its end.
FEWEST_STEPS = 2
# What CUDA takes on each GPU besides torch's memory: 0.4 to 0.6 GiB with cuBLAS and cuDNN loaded.
CONTEXT_BYTES = 600 << 20
METRICS_FILE = "metrics.csv"
HUGGING_FACE_FILE = "trainer_state.json"
_SMALL_IS_GOOD = ("loss", "mae", "error", "ece", "rmse", "perplexity")


@dataclass(frozen=True, slots=True)
class BatchCandidate:
    """A batch size on this GPU. ``samples_per_s`` is the compute ceiling, ``hours`` the time to the target."""

    batch: int
    vram_bytes: int
    vram_share: float
    samples_per_s: float | None
    learning_rate: ScaledRate | None
    hours: Hours | None = None


@dataclass(frozen=True, slots=True)
class GpuCandidate:
    """Another GPU: the largest batch that its memory holds, and whether that of the run fits.

    ``accumulation`` is (parts, samples in each) where the batch does not fit at once. ``speed`` and ``hours`` are None:
    they take a run on that GPU.
    """

    gpu: str
    memory_gib: float
    largest_batch: int | None
    fits: bool | None
    accumulation: tuple[int, int] | None = None
    speed: None = None
    hours: None = None


@dataclass(frozen=True, slots=True)
class LoaderMemory:
    """One number of workers of each rank: their RAM, batches and bytes queued ahead, and how long the queue lasts.

    ``fits`` is for all ranks together.
    """

    workers: int
    workers_bytes: int | None
    queued_batches: int
    queued_bytes: int | None
    buffer_s: float | None
    fits: bool | None


@dataclass(frozen=True, slots=True)
class VramBudget:
    """Bytes by part. Activations grow with the batch, ``workspace_bytes`` do not.

    ``fitted_at`` are the batch sizes that were measured. With only one, all that a step needs is taken to grow with the
    batch: the estimate for larger batches is then too high, never too low.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    other_bytes: int
    workspace_bytes: int
    activations_bytes_per_sample: float
    fitted_at: tuple[int, ...]

    def needed_bytes(self, batch: int) -> int:
        """torch's memory at a batch size."""
        held = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.other_bytes
        return held + self.workspace_bytes + round(self.activations_bytes_per_sample * batch)

    def largest_batch(self, vram_bytes: int) -> int | None:
        """How many samples fit into a GPU, with the usual reserve; None where memory does not grow with the batch."""
        if self.activations_bytes_per_sample <= 0:
            return None
        free = USABLE_VRAM * vram_bytes - CONTEXT_BYTES - self.needed_bytes(0)
        return max(0, int(free / self.activations_bytes_per_sample))


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of `fulltilt plan`. ``lacks`` says what the runs did not show."""

    run: str
    gpu: str | None
    batch: int | None
    samples_per_s: float | None
    compute_samples_per_s: float | None
    loader_samples_per_s: float | None
    vram: VramBudget | None
    largest_batch: int | None
    batches: tuple[BatchCandidate, ...]
    gpus: tuple[GpuCandidate, ...]
    loading: tuple[LoaderMemory, ...]
    lacks: tuple[str, ...]
    ranks: int = 1


def make_plan(runs: Sequence[Run]) -> Plan:
    """The plan for the job of the first run; the others are the same job. Raises UsageError for unfit runs."""
    _refuse_unfit(runs)
    run, diagnosis = runs[0], answer(runs[0])
    batch, reading = _batch_size(run), _gpu_of(run)
    total = None if reading is None else reading.vram_total_bytes
    budget = vram_budget(runs)
    largest = budget.largest_batch(total) if budget is not None and total is not None else None
    compute = diagnosis.ceilings.compute_samples_per_s if reading is not None else None
    reached = diagnosis.throughput.samples_per_s if diagnosis.throughput.steps >= FEWEST_STEPS else None

    return Plan(
        run=run.folder,
        gpu=None if reading is None else reading.name,
        batch=batch,
        samples_per_s=reached,
        compute_samples_per_s=compute,
        loader_samples_per_s=diagnosis.ceilings.loader_samples_per_s,
        vram=budget,
        largest_batch=largest,
        batches=_batches(runs, budget, batch, largest, total),
        gpus=() if budget is None else tuple(_on_gpu(name, budget, batch) for name in GPU_GIB),
        loading=_loader_memory(run, compute or reached),
        lacks=tuple(_lacks(budget, reading, batch, diagnosis.throughput.steps)),
        ranks=len(run.ranks),
    )


def _batch_size(run: Run) -> int | None:
    """The samples that go through the model at once on one GPU."""
    loaders = training_loaders(run.ranks[0])
    return next((loader.batch_size for loader in loaders if loader.batch_size), None)


def _gpu_of(run: Run) -> GpuReading | None:
    """The GPU that the run's first rank trained on; None for a job on the CPU."""
    rank, gpus = run.ranks[0], run.run.machine.gpus
    if not rank.device.startswith("cuda"):
        return None
    return next((gpu for gpu in gpus if gpu.uuid == rank.gpu_uuid), gpus[0] if len(gpus) == 1 else None)


def _refuse_unfit(runs: Sequence[Run]) -> None:
    """Raise UsageError for a run without training, and for runs of different models."""
    for run in runs:
        if not run.ranks:
            what = f"no training process of {run.folder} was recorded: its memory and speed are unknown"
            raise UsageError(what, "Plan from a run that has trained.")
    counts = {run.folder: run.ranks[0].memory.parameters for run in runs if run.ranks[0].memory}
    (folder, count), *others = counts.items() or [("", 0)]
    for other, parameters in others:
        if parameters != count:
            raise UsageError(
                f"{other} and {folder} trained different models: {parameters:,} and {count:,} parameters",
                "Give runs of one job at other batch sizes.",
            )


def with_target(plan: Plan, hours: Hours, reached_at: float) -> Plan:
    """The plan with the time to a target, which takes ``hours`` at ``reached_at`` samples per second."""

    def at(rate: float) -> Hours:
        """The hours at another rate, which the loader limits."""
        times = reached_at / min(rate, plan.loader_samples_per_s or rate)
        return hours[0] * times, hours[1] * times

    batches = (replace(row, hours=at(row.samples_per_s)) if row.samples_per_s else row for row in plan.batches)
    return replace(plan, batches=tuple(batches))


def vram_budget(runs: Sequence[Run]) -> VramBudget | None:
    """The memory budget of the first run's job; None when no run measured a GPU's memory."""
    seen = [
        (batch, rank.vram_peak_bytes, rank.memory)
        for run in runs
        if (rank := run.ranks[0]).vram_peak_bytes is not None and rank.memory is not None
        if (batch := _batch_size(run)) is not None
    ]
    if not seen:
        return None
    batch, peak, memory = seen[0]
    line = fit_line((size, held) for size, held, _ in seen)
    if line is not None and line.slope > 0:
        workspace, per_sample = max(0, round(line.intercept) - memory.resident_bytes), line.slope
    else:
        workspace, per_sample = 0, max(0, peak - memory.resident_bytes) / batch
    return VramBudget(
        weights_bytes=memory.weights_bytes,
        gradients_bytes=memory.gradients_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        other_bytes=memory.other_bytes or 0,
        workspace_bytes=workspace,
        activations_bytes_per_sample=per_sample,
        fitted_at=tuple(sorted({size for size, _, _ in seen})),
    )


def _batches(
    runs: Sequence[Run], budget: VramBudget | None, batch: int | None, largest: int | None, total: int | None
) -> tuple[BatchCandidate, ...]:
    """The present batch and its doublings that fit."""
    if budget is None or batch is None or not total or largest is None:
        return ()
    rank = runs[0].ranks[0]
    rate, optimizer = rank.learning_rate, rank.optimizers[0] if rank.optimizers else None
    deep = uses_deep_supervision(runs[0].run.command)
    sizes = [batch]
    while 2 * sizes[-1] <= largest:
        sizes.append(2 * sizes[-1])
    known = [(_batch_size(run), answer(run).ceilings.compute_samples_per_s) for run in runs]
    measured = {size: speed for size, speed in known if size and speed}
    step_s = fit_line((size, size / speed) for size, speed in measured.items())

    def speed_at(size: int) -> float | None:
        """As measured, else from a line of step time over batch size."""
        seconds = 0.0 if step_s is None else step_s.intercept + step_s.slope * size
        return measured.get(size) or (size / seconds if seconds > 0 else None)

    return tuple(
        BatchCandidate(
            batch=size,
            vram_bytes=budget.needed_bytes(size),
            vram_share=budget.needed_bytes(size) / total,
            samples_per_s=speed_at(size),
            learning_rate=None if rate is None else scale(rate, batch, size, optimizer, deep),
        )
        for size in sizes
    )


def _on_gpu(name: str, budget: VramBudget, batch: int | None) -> GpuCandidate:
    largest = budget.largest_batch(round(GPU_GIB[name] * (1 << 30)))
    fits = None if largest is None or batch is None else largest >= batch
    parts = accumulation_for(batch, largest) if batch is not None and largest is not None and not fits else None
    return GpuCandidate(name, GPU_GIB[name], largest, fits, parts)


def _lacks(budget: VramBudget | None, gpu: GpuReading | None, batch: int | None, steps: int) -> Iterator[str]:
    if steps < FEWEST_STEPS:
        yield f"the run trained {'one step' if steps else 'no step'}: its speed is unknown"
    if gpu is None:
        yield "the run had no GPU: its VRAM use is unknown"
    elif batch is None:
        yield "no DataLoader with a batch size was seen: memory by sample is unknown"
    elif budget is None:
        yield "memory by part was not measured: record the job again with this version of Fulltilt"
    elif len(budget.fitted_at) < 2:
        yield (
            f"only one batch size ({budget.fitted_at[0]}) was measured: a second run at another one would separate "
            "activations from memory that does not grow with the batch"
        )


def _loader_memory(run: Run, samples_per_s: float | None) -> tuple[LoaderMemory, ...]:
    """Rows for 0, 1, 2, 4 … workers up to the usable CPUs, and for the present number.

    ``samples_per_s`` is of all ranks together.
    """
    rank, machine, ranks = run.ranks[0], run.run.machine, len(run.ranks)
    loader = next(iter(training_loaders(rank)), None)
    if loader is None:
        return ()
    usable = max(1, int(machine.cpu.usable))
    limit = machine.mem_limit_bytes or machine.mem_total_bytes
    used = [sample.host.mem_used_bytes for sample in run.samples if sample.host.mem_used_bytes is not None]
    free = (limit - min(used)) // ranks if limit is not None and used else None
    worker = next((found for found in rank.workers if found.loader_id == loader.loader_id), None)
    each = worker.pss_bytes if worker is not None and worker.processes else None
    rows = []
    for workers in sorted({0, loader.num_workers, usable, *(2**power for power in range(8) if 2**power < usable)}):
        queued = workers * (loader.prefetch_factor or DEFAULT_PREFETCH)
        queued_bytes = None if loader.batch_bytes is None else queued * loader.batch_bytes
        held = 0 if not workers else None if each is None else workers * each
        ahead = queued * loader.batch_size * ranks / samples_per_s if samples_per_s and loader.batch_size else None
        needed = None if held is None or queued_bytes is None else held + queued_bytes
        fits = None if needed is None or free is None else needed <= free
        rows.append(LoaderMemory(workers, held, queued, queued_bytes, ahead, fits))
    return tuple(rows)


# --------------------------------------------------------------------------- other GPUs

# By the GiB that the driver offers: of GDDR6 on server GPUs a sixteenth goes to error correction.
_GPUS: dict[float, tuple[str, ...]] = {
    8: ("RTX 3070", "RTX 4060"),
    10: ("RTX 3080",),
    11: ("RTX 2080 Ti",),
    12: ("RTX 3060", "RTX 4070", "RTX 4070 Ti"),
    15: ("Tesla T4",),
    16: ("Tesla P100", "Tesla V100 16GB", "RTX 4080", "RTX 5070 Ti", "RTX 5080"),
    22.5: ("A10", "A10G", "L4"),
    24: ("RTX 3090", "RTX 4090"),
    32: ("Tesla V100 32GB", "RTX 5090"),
    40: ("A100 40GB",),
    45: ("A40", "L40S"),
    48: ("RTX A6000", "RTX 6000 Ada"),
    80: ("A100 80GB", "H100 PCIe", "H100"),
    94: ("H100 NVL",),
    140: ("H200", "H200 NVL"),
    180: ("B200",),
}
GPU_GIB = {name: gib for gib, names in _GPUS.items() for name in names}
# Words for the brand or the socket.
_NOT_THE_MODEL = frozenset({"nvidia", "geforce", "rtx", "tesla", "sxm2", "sxm3", "sxm4", "sxm5", "hbm3"})


def find_gpus(name: str) -> list[str]:
    """The GPUs of the table that a name matches; both where there are two sizes of memory."""
    asked = _words(name)
    exactly = [gpu for gpu in GPU_GIB if _words(gpu) == asked]
    return exactly or [gpu for gpu in GPU_GIB if asked and _words(gpu)[: len(asked)] == asked]


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=\d)(?=ti\b)|(?<=rtx)(?=\d)", " ", name.lower())  # RTX3080Ti
    return [word for word in re.findall(r"[a-z0-9]+", spaced) if word not in _NOT_THE_MODEL]


# --------------------------------------------------------------------------- the history of a metric


@dataclass(frozen=True, slots=True)
class Target:
    """``iou=0.75``, and whether larger or smaller is better."""

    metric: str
    value: float
    mode: Literal["max", "min"]


def parse_target(text: str) -> Target:
    """``METRIC=VALUE``. Raises UsageError."""
    name, sign, value = text.partition("=")
    try:
        wanted = float(value)
    except ValueError:
        wanted = math.nan
    if not sign or not name.strip() or not math.isfinite(wanted):
        raise UsageError(f"--target {text}: not METRIC=VALUE", "For instance: --target iou=0.75")
    small = any(part in name.lower() for part in _SMALL_IS_GOOD)
    return Target(name.strip(), wanted, "min" if small else "max")


def read_history(folders: Iterable[Path], metric: str) -> tuple[Points, float | None]:
    """(epoch, value) of a metric (``iou`` is ``eval_iou`` too) and the seconds an epoch takes. Raises UsageError."""
    known: set[str] = set()
    for folder in folders:
        for rows in (_csv_rows(folder / METRICS_FILE), _hugging_face_rows(folder)):
            known.update(name for row in rows for name in row if name not in ("epoch", "seconds"))
            points = _points(rows, metric) or _points(rows, f"eval_{metric}")
            if points:
                seconds = [row["seconds"] for row in rows if math.isfinite(row.get("seconds", math.nan))]
                return points, sum(seconds) / len(seconds) if seconds else None
    if known & {metric, f"eval_{metric}"}:
        raise UsageError(f"--target: {metric} was never a finite number", "Its training diverged, or has no epoch yet.")
    if known:
        raise UsageError(f"--target: no history of {metric}", f"There are: {', '.join(sorted(known))}")
    raise UsageError(
        f"--target: no history of {metric}", f"It is read from {METRICS_FILE} or {HUGGING_FACE_FILE} next to the run."
    )


def _points(rows: list[dict[str, float]], column: str) -> Points:
    pairs = ((row.get("epoch", math.nan), row.get(column, math.nan)) for row in rows)
    return tuple((epoch, value) for epoch, value in pairs if math.isfinite(epoch) and math.isfinite(value))


def _csv_rows(path: Path) -> list[dict[str, float]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return [_numbers(row.items()) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def _hugging_face_rows(folder: Path) -> list[dict[str, float]]:
    states = [folder / HUGGING_FACE_FILE, *sorted(folder.glob(f"checkpoint-*/{HUGGING_FACE_FILE}"))]
    rows: list[dict[str, float]] = []
    for path in states:
        try:
            written = read_json(path, follow=True)["log_history"]
        except (RunFolderError, KeyError, TypeError):
            continue
        if isinstance(written, list) and len(written) > len(rows):
            rows = [_numbers(entry.items()) for entry in written if isinstance(entry, dict)]
    return rows


def _numbers(items: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """The items that are numbers, finite or not."""
    found: dict[str, float] = {}
    for name, value in items:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            found[name] = float(value)
    return found
