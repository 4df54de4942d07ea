"""The plan: everything that one run, or several at different batch sizes, says about the next. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fulltilt.diagnosis import answer
from fulltilt.errors import UsageError
from fulltilt.records import Diagnosis, GpuReading, Run
from fulltilt.tuning.learning_rate import Scaled, accumulation_for, looks_deeply_supervised, scale
from fulltilt.tuning.memory_line import fit_line
from fulltilt.tuning.plan.elsewhere import Speed, memory_bound_share, speed_there
from fulltilt.tuning.plan.gpu_models import GPU_MODELS, GpuModel, Precision, find_gpu
from fulltilt.tuning.plan.loading import LoaderMemory, loader_memory
from fulltilt.tuning.plan.vram import VramBudget, batch_size, first_rank, vram_budget

Hours = tuple[float, float]

# The first step ends where counting begins: its time holds no wait for a batch.
FEWEST_STEPS = 2


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
            "are told apart from what does not grow with the batch"
        )
    if gpu is not None and here is None:
        yield f"{gpu.name} is not in the table of GPUs: no speed on others"
