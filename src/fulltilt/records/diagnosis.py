"""The diagnosis of a run, as `report --json` prints it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fulltilt.records.machine import GpuProcess
from fulltilt.records.run import SCHEMA_VERSION, Buckets, Phases

FindingCode = Literal[
    "input_serial",
    "input_cpu_bound",
    "slow_storage",
    "input_io_bound",
    "input_handover",
    "epoch_restart",
    "dataset_pickled",
    "transfer_blocking",
    "sync_point",
    "launch_bound",
    "batch_too_small",
    "precision_unused",
    "free_switches",
    "padding_waste",
    "slowing_down",
    "host_code",
    "recompiling",
    "gc_pauses",
    "validation_heavy",
    "checkpoint_stall",
    "memory_pressure",
    "worker_memory_growth",
    "cpu_affinity",
    "launch_contended",
    "gil_contended",
    "cpu_oversubscribed",
    "shm_small",
    "throttled",
    "gpu_shared",
    "straggler",
    "communication_bound",
    "find_unused_parameters",
    "compute_bound",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause: its share of the wall time, evidence, a concrete fix, and the predicted gain.

    Sentences give ``share_after_startup``, the share of the time after start-up.
    """

    code: FindingCode
    share: float
    severity: Literal["info", "warn", "severe"]
    evidence: tuple[str, ...]
    where: str | None
    fix: str
    predicted_speedup: tuple[float, float] | None
    share_after_startup: float | None = None
    title: str = ""


@dataclass(frozen=True, slots=True)
class Abstention:
    """A rule that could not judge, and what evidence it lacked."""

    code: FindingCode
    lacks: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The run in one sentence. ``code`` is the first finding's, ``no_steps`` when nothing trained, or ``too_short``.

    ``share`` is of the wall time; the sentence gives ``share_after_startup``.
    """

    code: str
    share: float
    sentence: str
    share_after_startup: float | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the wall time of a run went."""

    wall_s: float
    buckets: Buckets


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates over the training part of the run (start-up left out)."""

    samples_per_s: float | None
    steps_per_s: float | None
    steps: int
    samples: int | None = None


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best rate that each part could reach alone; None where it was not measured."""

    compute_samples_per_s: float | None
    loader_samples_per_s: float | None


@dataclass(frozen=True, slots=True)
class GpuStep:
    """The GPU's time in a mean step: kernels and copies, gaps between them, and idle. None where not measured."""

    kernel_s: float | None
    gap_s: float | None
    idle_s: float | None


@dataclass(frozen=True, slots=True)
class Utilisation:
    """How well the GPU is used, as fractions. None where it was not measured, and for jobs on the CPU.

    ``au`` (accelerator utilisation, as MLPerf Storage has it) is compute-only time over the time after start-up.
    ``mfu`` (model FLOPs utilisation) is the model's FLOPs a second of that time over ``peak_flops_per_s``, the dense
    peak of the GPU's data sheet for the arithmetic in use (``peak_precision``). One step was counted.
    """

    au: float | None = None
    mfu: float | None = None
    flops_per_step: float | None = None
    peak_flops_per_s: float | None = None
    peak_precision: str | None = None


@dataclass(frozen=True, slots=True)
class GpuSummary:
    """One GPU over the training part of a run: means, and peaks where the name says so."""

    uuid: str
    name: str
    index: int
    util_pct: float | None = None
    sm_active_pct: float | None = None
    sm_occupancy_pct: float | None = None
    tensor_active_pct: float | None = None
    dram_active_pct: float | None = None
    vram_used_bytes: int | None = None
    vram_peak_bytes: int | None = None
    vram_total_bytes: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    temperature_peak_c: float | None = None
    throttled_share: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    foreign_processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank compared with the others.

    ``own_work_s`` is its time after start-up without communication, ``waits_s`` how long it waits for the slowest rank
    (0 for the slowest itself). ``relative_speed`` is its speed in its own work over that of the fastest rank,
    ``own_past_speed`` that of its last steps over that of its first, ``last_share`` how often it was the late rank.
    """

    rank: int
    buckets: Buckets
    steps: int
    own_work_s: float
    waits_s: float
    slowest: bool
    hostname: str | None = None
    finished: bool = True
    relative_speed: float | None = None
    own_past_speed: float | None = None
    last_share: float | None = None


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job over several tasks, with all its attempts.

    ``goodput`` is the part of ``elapsed_s`` that was spent in training steps, including those that a later attempt
    repeated; ``rest`` is where the remaining seconds went.
    """

    job: str
    tasks: int
    hosts: tuple[str, ...]
    attempts: int
    elapsed_s: float
    goodput: float
    rest: tuple[tuple[str, float], ...]
    missing_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One line of a checklist or preflight: passed, warned or failed, with its figure and its remedy."""

    name: str
    state: Literal["ok", "warn", "fail", "skip"]
    figure: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        if self.state == "ok":
            object.__setattr__(self, "remedy", None)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that is said about a run. ``step`` is the mean training step.

    ``invalid_because`` says why the timings are not valid (a GPU slowed down or shared); None when they are.
    """

    verdict: Verdict
    ledger: Ledger
    throughput: Throughput
    ceilings: Ceilings
    gpu: tuple[GpuSummary, ...]
    findings: tuple[Finding, ...]
    abstained: tuple[Abstention, ...]
    checklist: tuple[CheckLine, ...]
    settings: tuple[tuple[str, str | int | float | bool | None], ...]
    ranks: tuple[RankSummary, ...] = ()
    step: Phases | None = None
    gpu_step: GpuStep | None = None
    utilisation: Utilisation = Utilisation()
    invalid_because: str | None = None
    job: JobSummary | None = None
    schema_version: int = SCHEMA_VERSION
