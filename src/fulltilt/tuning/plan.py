"""The plan: what one run, or several at different batch sizes, says about the next. Pure functions over runs.

GPU memory by part and the batches that fit, other GPUs by their data sheets, what workers and their queue hold, and a
metric's history for the time to a target.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fulltilt.diagnosis import answer
from fulltilt.errors import UsageError
from fulltilt.records import Diagnosis, GpuReading, LoaderRecord, MemoryRecord, RankRecord, Run, WorkerRecord
from fulltilt.tuning.gpu_models import GPU_MODELS, GpuModel, Precision, find_gpu
from fulltilt.tuning.learning_rate import Scaled, accumulation_for, looks_deeply_supervised, scale
from fulltilt.tuning.memory_line import USABLE_VRAM, fit_line

Hours = tuple[float, float]

# The first step ends where counting begins: its time holds no wait for a batch.
FEWEST_STEPS = 2
# What CUDA itself takes on each GPU besides torch's memory: 0.4 to 0.6 GiB with cuBLAS and cuDNN loaded.
CONTEXT_BYTES = 600 << 20
# How far a job strays from the ratio of two data sheets although the right one of the two rates was taken.
MODEL_ERROR = 0.15
TORCH_DEFAULT_PREFETCH = 2
METRICS_FILE = "metrics.csv"
HUGGING_FACE_FILE = "trainer_state.json"
_SMALL_IS_GOOD = ("loss", "mae", "error", "ece", "rmse", "perplexity")


@dataclass(frozen=True, slots=True)
class BatchCandidate:
    """A batch size on this GPU. ``samples_per_s`` is the compute ceiling; ``hours`` to the target asked for."""

    batch: int
    vram_bytes: int
    vram_share: float
    samples_per_s: float | None
    learning_rate: Scaled | None
    hours: Hours | None = None


@dataclass(frozen=True, slots=True)
class GpuCandidate:
    """Another GPU: the largest batch there, and the speed at the batch of the run (or the largest that fits).

    ``accumulation`` is how many parts of what size make up the batch of the run where it does not fit in one.
    """

    gpu: str
    memory_gib: float
    largest_batch: int | None
    speed: Speed | None
    fits: bool | None
    hours: Hours | None = None
    accumulation: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """``lacks`` says in words what the runs did not show."""

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
    """The plan from runs of one job; the first is the one that is planned for. Raises UsageError for other models."""
    _refuse_another_model(runs)
    run, diagnosis = runs[0], answer(runs[0])
    rank, batch = first_rank(run), batch_size(run)
    reading = _gpu_of(run)
    here = None if reading is None else find_gpu(reading.name, reading.vram_total_bytes)
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
        gpus=_gpus(diagnosis, run, budget, batch, here, compute),
        loading=() if rank is None else loader_memory(run, rank, compute or reached),
        lacks=tuple(_lacks(run, budget, reading, here, batch, diagnosis.throughput.steps)),
        ranks=max(1, len(run.ranks)),
    )


def _refuse_another_model(runs: Sequence[Run]) -> None:
    """A line through the memory of two models says nothing about either."""
    counts = {run.folder: rank.memory.parameters for run in runs if (rank := first_rank(run)) and rank.memory}
    (folder, count), *others = counts.items() or [("", 0)]
    for other, parameters in others:
        if parameters != count:
            raise UsageError(
                f"{other} trained another model than {folder}: {parameters:,} parameters against {count:,}",
                "Give runs of one job at other batch sizes.",
            )


def with_target(plan: Plan, hours: Hours, reached_at: float) -> Plan:
    """The plan with the time to a target, which takes ``hours`` at ``reached_at`` samples per second."""

    def at(slow: float, fast: float) -> Hours:
        """At another rate, but never faster than the loader: it does not get faster with the GPU."""
        most = plan.loader_samples_per_s or fast
        return hours[0] * reached_at / min(fast, most), hours[1] * reached_at / min(slow, most)

    batches = tuple(
        replace(row, hours=at(row.samples_per_s, row.samples_per_s)) if row.samples_per_s else row
        for row in plan.batches
    )
    gpus = tuple(
        replace(row, hours=at(row.speed.low, row.speed.high))
        if row.speed is not None and row.largest_batch != 0
        else row
        for row in plan.gpus
    )
    return replace(plan, batches=batches, gpus=gpus)


def _batches(
    runs: Sequence[Run], budget: VramBudget | None, batch: int | None, largest: int | None, total: int | None
) -> tuple[BatchCandidate, ...]:
    """The batch as it is, and its doublings that fit."""
    if budget is None or batch is None or not total or largest is None:
        return ()
    rank = first_rank(runs[0])
    rate = None if rank is None else rank.learning_rate
    optimizer = rank.optimizers[0] if rank is not None and rank.optimizers else None
    deep = looks_deeply_supervised(runs[0].run.command)
    sizes = [batch]
    while 2 * sizes[-1] <= largest:
        sizes.append(2 * sizes[-1])
    speed = _speed_by_batch(runs)
    return tuple(
        BatchCandidate(
            batch=size,
            vram_bytes=budget.needed_bytes(size),
            vram_share=budget.needed_bytes(size) / total,
            samples_per_s=speed(size),
            learning_rate=None if rate is None else scale(rate, batch, size, optimizer, deep),
        )
        for size in sizes
    )


def _speed_by_batch(runs: Sequence[Run]) -> Callable[[int], float | None]:
    """Samples per second at a batch size: measured where it was, else from a line of step time over batch size."""
    known = [(batch_size(run), answer(run).ceilings.compute_samples_per_s) for run in runs]
    measured = {size: rate for size, rate in known if size and rate}
    step_ns = fit_line((size, round(1e9 * size / rate)) for size, rate in measured.items())

    def speed(size: int) -> float | None:
        if size in measured:
            return measured[size]
        if step_ns is None or step_ns.at(size) <= 0:
            return None
        return 1e9 * size / step_ns.at(size)

    return speed


def _gpus(
    diagnosis: Diagnosis,
    run: Run,
    budget: VramBudget | None,
    batch: int | None,
    here: GpuModel | None,
    compute: float | None,
) -> tuple[GpuCandidate, ...]:
    if budget is None:
        return ()
    seen = diagnosis.gpu[0] if diagnosis.gpu else None
    bound = None if seen is None else memory_bound_share(seen.tensor_active_pct, seen.dram_active_pct)
    precision = precision_of(run)
    rows = []
    for model in GPU_MODELS:
        largest = budget.largest_batch(model.memory_bytes)
        speed = None
        if here is not None and compute is not None:
            speed = speed_there(compute, here, model, precision, bound)
        fits = None if largest is None or batch is None else largest >= batch
        parts = accumulation_for(batch, largest) if batch is not None and largest is not None and not fits else None
        rows.append(GpuCandidate(model.name, model.memory_gib, largest, speed, fits, accumulation=parts))
    return tuple(rows)


def precision_of(run: Run) -> Precision:
    """The precision that the run's products were computed in."""
    rank = first_rank(run)
    seen = None if rank is None else rank.precision
    if seen is None:
        return "fp32"
    for name, short in (("bfloat16", "bf16"), ("float16", "fp16")):
        if name in (seen.autocast, seen.parameters):
            return short  # type: ignore[return-value]
    return "tf32" if seen.tf32 else "fp32"


def _gpu_of(run: Run) -> GpuReading | None:
    """The GPU that the run's first rank trained on; None for a job on the CPU."""
    rank = first_rank(run)
    if rank is None or not rank.device.startswith("cuda"):
        return None
    gpus = run.run.machine.gpus
    return next((gpu for gpu in gpus if gpu.uuid == rank.gpu_uuid), gpus[0] if len(gpus) == 1 else None)


def _lacks(
    run: Run, budget: VramBudget | None, gpu: GpuReading | None, here: GpuModel | None, batch: int | None, steps: int
) -> Iterator[str]:
    if not run.ranks:
        yield "no process of the run was recorded: nothing is known of its memory and speed"
    elif steps < FEWEST_STEPS:
        yield f"the run trained {'one step' if steps else 'no step'}: nothing is known of its speed"
    if not run.ranks:
        return
    if gpu is None:
        yield "the run had no GPU: nothing is known of VRAM and of speed on other GPUs"
    elif batch is None:
        yield "the batch size is not known (no DataLoader with one): no budget by sample"
    elif budget is None:
        yield "memory by part was not measured: record the job again with this version of Fulltilt"
    elif len(budget.fitted_at) < 2:
        yield (
            f"one batch size ({budget.fitted_at[0]}) was measured: give a second run at another one, and activations "
            "are separated from what does not grow with the batch"
        )
    if gpu is not None and here is None:
        yield f"{gpu.name} is not in the table of GPUs: no speed on others"


# --------------------------------------------------------------------------- GPU memory by part


@dataclass(frozen=True, slots=True)
class VramBudget:
    """Bytes by part. ``activations_bytes_per_sample`` and ``workspace_bytes`` grow with the batch and do not.

    ``fitted_at`` are the batch sizes they were measured at: with only one of them everything that a step needs is taken
    to grow with the batch, which promises too little for larger batches, never too much.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    other_bytes: int
    workspace_bytes: int
    activations_bytes_per_sample: float
    fitted_at: tuple[int, ...]

    @property
    def fixed_bytes(self) -> int:
        """What a batch of any size needs."""
        held = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.other_bytes
        return held + self.workspace_bytes

    def needed_bytes(self, batch: int) -> int:
        """torch's memory at a batch size."""
        return self.fixed_bytes + round(self.activations_bytes_per_sample * batch)

    def largest_batch(self, vram_bytes: int) -> int | None:
        """How many samples fit into a GPU, with the usual reserve; None when a batch costs nothing."""
        if self.activations_bytes_per_sample <= 0:
            return None
        room = USABLE_VRAM * vram_bytes - CONTEXT_BYTES - self.fixed_bytes
        return max(0, int(room / self.activations_bytes_per_sample))


def vram_budget(runs: Sequence[Run]) -> VramBudget | None:
    """The budget that the runs show; None when none of them measured a GPU's memory."""
    seen = [found for run in runs if (found := _measured(run)) is not None]
    if not seen:
        return None
    batch, peak, memory = seen[0]
    resident = memory.resident_bytes
    line = fit_line((size, held) for size, held, _ in seen)
    if line is not None and line.each_bytes > 0:
        workspace, per_sample = max(0, round(line.fixed_bytes) - resident), line.each_bytes
    else:
        workspace, per_sample = 0, max(0, peak - resident) / batch
    return VramBudget(
        weights_bytes=memory.weights_bytes,
        gradients_bytes=memory.gradients_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        other_bytes=memory.other_bytes or 0,
        workspace_bytes=workspace,
        activations_bytes_per_sample=per_sample,
        fitted_at=tuple(sorted({size for size, _, _ in seen})),
    )


def _measured(run: Run) -> tuple[int, int, MemoryRecord] | None:
    rank = first_rank(run)
    batch = batch_size(run)
    if rank is None or batch is None or rank.vram_peak_bytes is None or rank.memory is None:
        return None
    return batch, rank.vram_peak_bytes, rank.memory


def first_rank(run: Run) -> RankRecord | None:
    """The rank that stands for all."""
    return run.ranks[0] if run.ranks else None


def batch_size(run: Run) -> int | None:
    """The samples that go through the model at once on one GPU."""
    rank = first_rank(run)
    sizes = [loader.batch_size for loader in rank.loaders if loader.role == "train"] if rank is not None else []
    return next((size for size in sizes if size), None)


# --------------------------------------------------------------------------- speed on another GPU


@dataclass(frozen=True, slots=True)
class Speed:
    """Samples per second, between ``low`` and ``high``; ``precision`` is what would be computed with there."""

    likely: float
    low: float
    high: float
    precision: Precision


def speed_there(
    samples_per_s: float,
    here: GpuModel,
    there: GpuModel,
    precision: Precision,
    memory_bound: float | None = None,
) -> Speed:
    """The compute ceiling on another GPU when it is ``samples_per_s`` here.

    Arithmetic goes with the peak rates, reading and writing with the bandwidths; a job lies between the two.
    ``memory_bound`` (0 to 1) is where it lay here; without it, the geometric middle.
    """
    rate_here, _ = here.rate(precision)
    rate_there, used = there.rate(precision)
    arithmetic = rate_there / rate_here
    bandwidth = there.bandwidth_gb_per_s / here.bandwidth_gb_per_s
    weight = 0.5 if memory_bound is None else min(max(memory_bound, 0.0), 1.0)
    likely = math.exp((1 - weight) * math.log(arithmetic) + weight * math.log(bandwidth))
    if there is here:
        return Speed(samples_per_s, samples_per_s, samples_per_s, used)
    low, high = min(arithmetic, bandwidth) * (1 - MODEL_ERROR), max(arithmetic, bandwidth) * (1 + MODEL_ERROR)
    return Speed(samples_per_s * likely, samples_per_s * low, samples_per_s * high, used)


def memory_bound_share(tensor_active_pct: float | None, dram_active_pct: float | None) -> float | None:
    """Where a job lies between arithmetic (0) and bandwidth (1), from how busy either unit was; None if not known."""
    if tensor_active_pct is None or dram_active_pct is None or tensor_active_pct + dram_active_pct <= 0:
        return None
    return dram_active_pct / (tensor_active_pct + dram_active_pct)


# --------------------------------------------------------------------------- what workers and their queue hold


@dataclass(frozen=True, slots=True)
class LoaderMemory:
    """One number of workers: RAM of them all, batches and bytes queued ahead, and how long those would last.

    Of each rank, which has workers of its own; ``fits`` is for all ranks together.
    """

    workers: int
    workers_bytes: int | None
    queued_batches: int
    queued_bytes: int | None
    buffer_s: float | None
    fits: bool | None


def loader_memory(run: Run, rank: RankRecord, samples_per_s: float | None) -> tuple[LoaderMemory, ...]:
    """Rows for 0, 1, 2, 4 … workers up to the usable CPUs, with the settings in force among them.

    ``samples_per_s`` is what all ranks together can take.
    """
    loader = next((found for found in rank.loaders if found.role == "train"), None)
    if loader is None:
        return ()
    usable = max(1, int(run.run.machine.cpu.usable))
    counts = {0, loader.num_workers, usable, *(2**power for power in range(8) if 2**power < usable)}
    worker = next((found for found in rank.workers if found.loader_id == loader.loader_id), None)
    ranks = max(1, len(run.ranks))
    free = _free_bytes(run)
    free_each = None if free is None else free // ranks
    taken_each = None if samples_per_s is None else samples_per_s / ranks
    return tuple(_row(count, loader, worker, taken_each, free_each) for count in sorted(counts))


def _row(
    workers: int, loader: LoaderRecord, worker: WorkerRecord | None, samples_per_s: float | None, free: int | None
) -> LoaderMemory:
    queued = workers * (loader.prefetch_factor or TORCH_DEFAULT_PREFETCH)
    queued_bytes = None if loader.batch_bytes is None else queued * loader.batch_bytes
    each = worker.pss_bytes if worker is not None and worker.processes else None
    held = 0 if not workers else None if each is None else workers * each
    ahead = None
    if samples_per_s and loader.batch_size:
        ahead = queued * loader.batch_size / samples_per_s
    needed = None if held is None or queued_bytes is None else held + queued_bytes
    fits = None if needed is None or free is None else needed <= free
    return LoaderMemory(workers, held, queued, queued_bytes, ahead, fits)


def _free_bytes(run: Run) -> int | None:
    """RAM that the machine has for workers: its limit less what everything but them took."""
    machine = run.run.machine
    limit = machine.mem_limit_bytes or machine.mem_total_bytes
    used = [sample.host.mem_used_bytes for sample in run.samples if sample.host.mem_used_bytes is not None]
    return limit - min(used) if limit is not None and used else None


# --------------------------------------------------------------------------- the history of a metric


@dataclass(frozen=True, slots=True)
class Target:
    """``iou=0.75``, and whether larger or smaller is better."""

    metric: str
    value: float
    mode: Literal["max", "min"]


@dataclass(frozen=True, slots=True)
class History:
    """(epoch, value) for a metric, and the seconds an epoch takes, where they were written down."""

    points: tuple[tuple[float, float], ...]
    epoch_s: float | None


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


def read_history(folders: Iterable[Path], metric: str) -> History:
    """The metric's history from the first folder that has one. Raises UsageError that names what there is.

    ``iou`` stands for ``eval_iou`` too, as everywhere in a training.
    """
    known: set[str] = set()
    for folder in folders:
        for rows in (_csv_rows(folder / METRICS_FILE), _hugging_face_rows(folder)):
            known.update(name for row in rows for name in row if name not in ("epoch", "seconds"))
            points = _points(rows, metric) or _points(rows, f"eval_{metric}")
            if points:
                seconds = [row["seconds"] for row in rows if math.isfinite(row.get("seconds", math.nan))]
                return History(points, sum(seconds) / len(seconds) if seconds else None)
    if known & {metric, f"eval_{metric}"}:
        raise UsageError(f"--target: {metric} was never a finite number", "Its training diverged, or has no epoch yet.")
    if known:
        raise UsageError(f"--target: no history of {metric}", f"There are: {', '.join(sorted(known))}")
    raise UsageError(
        f"--target: no history of {metric}", f"It is read from {METRICS_FILE} or {HUGGING_FACE_FILE} beside the run."
    )


def _points(rows: list[dict[str, float]], column: str) -> tuple[tuple[float, float], ...]:
    """(epoch, value) of each row; a metric that diverged for an epoch (nan) has none there."""
    pairs = ((row.get("epoch", math.nan), row.get(column, math.nan)) for row in rows)
    return tuple((epoch, value) for epoch, value in pairs if math.isfinite(epoch) and math.isfinite(value))


def _csv_rows(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file. A new column starts a new header line in its middle."""
    rows: list[dict[str, float]] = []
    header: list[str] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for line in csv.reader(file):
                if "epoch" in line:  # Lightning sorts its columns: accuracy comes first
                    header = line
                else:
                    rows.append(_numbers(zip(header, line, strict=False)))
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    return rows


def _hugging_face_rows(folder: Path) -> list[dict[str, float]]:
    states = [folder / HUGGING_FACE_FILE, *sorted(folder.glob(f"checkpoint-*/{HUGGING_FACE_FILE}"))]
    rows: list[dict[str, float]] = []
    for path in states:
        try:
            written = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(written, list) and len(written) > len(rows):
            rows = [_numbers(entry.items()) for entry in written if isinstance(entry, dict)]
    return rows


def _numbers(items: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """What is a number, finite or not."""
    found: dict[str, float] = {}
    for name, value in items:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            found[name] = float(value)
    return found
