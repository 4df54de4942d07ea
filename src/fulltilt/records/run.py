"""The records of a run and its ranks: the format of a run folder."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import datetime
from operator import add, attrgetter
from typing import Literal

from fulltilt.records.machine import Machine, Sample, StorageReading
from fulltilt.records.secrets import mask_arguments, mask_text

# --------------------------------------------------------------------------- where the time went


@dataclass(frozen=True, slots=True)
class Buckets:
    """Where time went, in seconds. The sum is the wall time that it describes."""

    startup_s: float = 0.0
    data_wait_s: float = 0.0
    transfer_s: float = 0.0
    compute_s: float = 0.0
    sync_s: float = 0.0
    host_code_s: float = 0.0
    validation_s: float = 0.0
    checkpoint_s: float = 0.0
    epoch_turnover_s: float = 0.0
    communication_s: float = 0.0
    unattributed_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The wall time that these buckets describe."""
        return float(sum(_figures_of(self)))

    def plus(self, other: Buckets) -> Buckets:
        """The sum of both."""
        return Buckets(*map(add, _figures_of(self), _figures_of(other)))


BUCKETS: tuple[str, ...] = tuple(f.name for f in fields(Buckets))
_figures_of = attrgetter(*BUCKETS)


@dataclass(frozen=True, slots=True)
class Phases:
    """Host time of each part of a step, and GPU time. In a span they are sums over its steps, like the buckets."""

    load_s: float = 0.0
    transfer_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    other_s: float = 0.0
    gpu_busy_s: float | None = None
    gpu_idle_s: float | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a rank's wall time with ``steps`` optimizer steps (0 for time outside steps).

    The spans of a rank follow each other without gaps. Early ones hold one step; later ones hold many, so that the
    files of a million steps stay small.
    """

    t0_s: float
    t1_s: float
    first_step: int
    steps: int
    batches: int
    samples: int | None
    buckets: Buckets
    epoch: int = 0
    skipped_steps: int = 0
    phases: Phases | None = None


@dataclass(frozen=True, slots=True)
class HotLine:
    """A line of code and the time it cost. ``where`` is ``file:line``, ``call`` the expression.

    ``inside`` are the library functions that it was mostly in, the one that it calls and the innermost:
    ``numpy/lib/_npyio_impl.py:NpzFile.__getitem__``.
    """

    where: str
    function: str
    seconds: float
    call: str | None = None
    waits: bool = False  # for another thread or process
    inside: str | None = None

    def __post_init__(self) -> None:
        if self.call is not None:
            object.__setattr__(self, "call", mask_text(self.call))


# --------------------------------------------------------------------------- settings and trials

# More workers, or batches in a queue, than help on any machine; torch would start them until the memory is full.
MOST_OF_A_SETTING = 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a job. ``None`` leaves a setting as the job has it."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    torch_threads: int | None = None
    start_method: str | None = None
    batch_size: int | None = None
    accumulation: int | None = None
    precision: str | None = None
    compile: bool | None = None
    residency: str | None = None


@dataclass(frozen=True, slots=True)
class LiveMove:
    """Settings that live tuning tried while the job trained, and the outcome.

    ``batch`` is how many batches the loader had given when it began, the same on all ranks.
    """

    settings: Settings
    began_s: float
    outcome: Literal["trying", "kept", "returned", "failed"] = "trying"
    batches_per_s: float | None = None
    wait_share: float | None = None
    why: str | None = None
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """What live tuning did to one loader of a rank: the settings ``before``, and the ``settings`` in force.

    ``cost_s`` is time of the training thread spent on tuning itself. ``note`` is a side effect that the user should
    know, such as other random numbers. ``ranks`` is how many changed together; the figures are those of the slowest.
    """

    loader_id: int
    state: Literal["watching", "trying", "settled", "left_alone"]
    why: str
    before: Settings
    settings: Settings
    before_batches_per_s: float | None = None
    before_wait_share: float | None = None
    batches_per_s: float | None = None
    wait_share: float | None = None
    moves: tuple[LiveMove, ...] = ()
    cost_s: float = 0.0
    note: str | None = None
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured try of settings. An out-of-memory trial is a result, not a failure.

    ``settings`` is what was asked for, ``in_force`` what the job then ran with. ``losses`` are of the first steps;
    ``cpu_pct`` of 100 is one core. ``others_share`` is the share of the CPUs that other processes used.
    """

    settings: Settings
    state: Literal["ok", "oom", "crashed", "timed_out", "not_measured", "diverged", "throttled"]
    samples_per_s: float | None = None
    samples_per_s_low: float | None = None
    samples_per_s_high: float | None = None
    vram_peak_bytes: int | None = None
    ram_peak_bytes: int | None = None
    note: str | None = None
    purpose: Literal["start", "search", "verify"] = "search"
    in_force: Settings = field(default_factory=Settings)
    data_wait_share: float | None = None
    vram_total_bytes: int | None = None
    gpu_util_pct: float | None = None
    cpu_pct: float | None = None
    wall_s: float | None = None
    losses: tuple[float, ...] = ()
    folder: str | None = None
    others_share: float | None = None
    steps: int | None = None


# --------------------------------------------------------------------------- the job on one rank


@dataclass(frozen=True, slots=True)
class LoaderRecord:
    """A DataLoader and how one rank used it.

    ``where`` is the user's line; ``made_by`` is the library that this line calls to construct the loader, None if the
    line constructs it itself, and "script" for batches without a DataLoader. A loader that one line constructs for each
    pass is one record, ``constructed`` so many times. ``eval_batches`` of its batches were used to evaluate.
    ``pickled_workers`` were not forked: each got ``pickled_bytes`` of data set and arguments, which took the training
    thread ``pickle_s`` in all. ``sampler_lines`` are lines of its sampler, which always runs in the training thread.
    """

    loader_id: int
    role: Literal["train", "eval", "unused"]
    where: str | None
    dataset: str
    dataset_len: int | None
    iterable: bool
    batch_size: int | None
    num_workers: int
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    shuffle: bool | None = None
    collate: str | None = None
    start_method: str | None = None
    given: tuple[str, ...] = ()
    made_by: str | None = None
    constructed: int = 1
    passes: int = 0
    batches: int = 0
    samples: int | None = None
    batch_bytes: int | None = None
    batch_kind: str | None = None
    batch_tensors: int | None = None
    wait_s: float = 0.0
    wait_cpu_s: float = 0.0
    helpers_cpu_s: float = 0.0  # of other threads of the process in waits without workers, as zarr has
    first_wait_s: float = 0.0
    restart_s: float = 0.0
    padding_share: float | None = None
    eval_batches: int = 0
    sampler_lines: tuple[HotLine, ...] = ()
    batch_shapes: int | None = None  # distinct ones among the batches that were looked into
    pickled_workers: int = 0
    pickled_bytes: int = 0
    pickle_s: float = 0.0
    objects: str | None = None  # the largest list or dict among the attributes of the data set


@dataclass(frozen=True, slots=True)
class MemoryGrowthRecord:
    """How the private memory of a worker grew steadily in the later half of its life; the mean over the workers.

    ``copied_bytes`` of it were pages shared with the training process until they were written to (by reference counts);
    ``shared_bytes`` still are.
    """

    bytes: int
    over_s: float
    batches: float
    copied_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """All workers of one loader on one rank together: their time and their costliest lines.

    ``reads`` are calls of read, ``read_bytes`` what came from storage; ``cpus`` is how many CPUs they may run on;
    ``data``, the storage of the files that they read. ``fetch_cpu_s`` includes other threads that fetching uses.
    ``first_batches`` began a pass: what is called ``first_`` is the part of them, which may import modules, open files
    or fill a shuffle buffer.
    """

    loader_id: int
    processes: int
    batches: int
    fetch_s: float
    fetch_cpu_s: float
    cpu_wait_s: float | None
    idle_s: float
    process_cpu_s: float
    read_bytes: int | None
    lines: tuple[HotLine, ...] = ()
    pss_bytes: int | None = None  # of one worker, their mean
    growing_lines: tuple[HotLine, ...] = ()
    reads: int | None = None
    read_bytes_by_pass: tuple[int, ...] = ()
    cpus: int | None = None
    growth: MemoryGrowthRecord | None = None
    data: StorageReading | None = None
    first_batches: int | None = None
    first_fetch_s: float | None = None
    first_fetch_cpu_s: float | None = None
    first_cpu_wait_s: float | None = None
    first_lines: tuple[HotLine, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """Memory by part, measured once at the end of an early step.

    ``other_bytes``: frozen weights, buffers and data kept on the GPU; None for a job on the CPU.
    """

    parameters: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    other_bytes: int | None = None

    @property
    def resident_bytes(self) -> int:
        """What stays from step to step."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + (self.other_bytes or 0)


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """Copies from host to GPU made by the training thread."""

    copies: int
    bytes: int | None
    pageable_share: float | None
    blocking_share: float | None
    where: str | None


@dataclass(frozen=True, slots=True)
class PrecisionRecord:
    """The arithmetic that the job used, as far as known."""

    autocast: str | None
    parameters: str | None
    tf32: bool | None
    compiled: bool
    cudnn_benchmark: bool | None = None
    fused_optimizer: bool | None = None

    @property
    def name(self) -> str | None:
        """``bfloat16`` under autocast, otherwise the type of the parameters."""
        return self.autocast or self.parameters


@dataclass(frozen=True, slots=True)
class CommunicationRecord:
    """Gradient exchange per step. None where it was only counted in the buckets."""

    communication_s: float | None = None
    overlapped_s: float | None = None


@dataclass(frozen=True, slots=True)
class UnusedSearchRecord:
    """DistributedDataParallel with find_unused_parameters=True, ``asked`` after so many steps what it had found.

    ``unused_bytes`` is the most that it found in any of them; ``where`` is the line that constructs it.
    """

    where: str | None
    asked: int
    unused_bytes: int


@dataclass(frozen=True, slots=True)
class DeepRecord:
    """What torch.profiler saw over a few steps (``--deep N``). Times are per step."""

    steps: int
    step_s: float
    gpu_busy_s: float | None
    kernel_gaps_s: float | None
    copies_s: float | None
    kernels: int | None
    tensor_core_share: float | None
    top_kernels: tuple[HotLine, ...] = ()
    sync_calls: tuple[HotLine, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """What the GPU ran in a few steps, profiled now and then while the job runs. Times are per step.

    ``busy_s`` is the union of all kernels, without gaps between them and copies from and to the host.
    """

    steps: int
    busy_s: float
    copies_s: float
    kernels: int
    tensor_core_share: float | None
    top_kernels: tuple[HotLine, ...] = ()


@dataclass(frozen=True, slots=True)
class CompileRecord:
    """What torch.compile did. ``recompile_lines`` are functions that were compiled again, with the reason.

    ``seconds`` are of the host; the ledger counts those on the training thread as start-up.
    """

    compiles: int
    seconds: float
    recompiles: int = 0
    recompile_lines: tuple[HotLine, ...] = ()
    graph_breaks: int = 0
    break_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ThreadRecord:
    """Python threads of one name besides the training thread, and the lines that they ran."""

    name: str
    cpu_s: float
    lines: tuple[HotLine, ...] = ()


@dataclass(frozen=True, slots=True)
class GarbageRecord:
    """Garbage collections on the training thread after start-up. ``full`` ones walk through every object.

    ``asked_for`` are lines that call gc.collect(), directly or through a library.
    """

    collections: int
    full: int
    seconds: float
    longest_s: float
    asked_for: tuple[HotLine, ...] = ()


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Everything recorded of one rank besides its spans. Rewritten atomically while the job runs.

    ``under_way`` is the time since the last step, which shows where a job hung that was killed; ``at`` is the line that
    the training thread was at. ``group`` is the same for all ranks of a process group, and another after a restart.
    """

    rank: int
    world_size: int
    pid: int
    hostname: str
    device: str
    gpu_uuid: str | None
    t0_s: float
    t1_s: float
    finished: bool
    steps: int
    backwards: int
    optimizers: tuple[str, ...] = ()
    optimizer_calls: int = 0
    learning_rate: float | None = None
    loaders: tuple[LoaderRecord, ...] = ()
    workers: tuple[WorkerRecord, ...] = ()
    host_lines: tuple[HotLine, ...] = ()
    drawing_lines: tuple[HotLine, ...] = ()  # those that make batches or wait for them, without a loader
    growing_lines: tuple[HotLine, ...] = ()  # what lines cost more than in the early steps
    compute_lines: tuple[HotLine, ...] = ()  # lines from which torch computes on the CPU, without backward
    drawn_from: HotLine | None = None  # a generator of the script, at the line where the training loop iterates over it
    loop_calls: tuple[HotLine, ...] = ()  # lines of the training loop that call a function of the script
    validates_at: str | None = None  # the line in or around the training loop that calls the validation
    sync_lines: tuple[HotLine, ...] = ()
    checkpoint_lines: tuple[HotLine, ...] = ()
    validation_lines: tuple[HotLine, ...] = ()  # of the script's own code in validation, without what torch computes
    syncs: int = 0
    transfer: TransferRecord | None = None
    precision: PrecisionRecord | None = None
    communication: CommunicationRecord | None = None
    unused_search: UnusedSearchRecord | None = None
    sharded: bool = False  # parameters divided among the ranks (FSDP, tensor parallel)
    deep: DeepRecord | None = None
    kernels: KernelRecord | None = None
    compile: CompileRecord | None = None
    garbage: GarbageRecord | None = None
    gpu_busy_step_s: float | None = None
    launch_s: float | None = None
    flops_per_call: float | None = None  # of the work for one optimizer call, counted once
    vram_peak_bytes: int | None = None
    alloc_retries: int | None = None
    memory: MemoryRecord | None = None
    torch_threads: int | None = None
    cpus_at_start: int | None = None
    cpus: int | None = None
    cpu_wait_s: float | None = None  # the training thread was ready to run but had no CPU
    off_cpu_s: float | None = None  # the training thread did not run, for this or any other reason
    threads: tuple[ThreadRecord, ...] = ()
    notes: tuple[str, ...] = ()
    live: tuple[LiveRecord, ...] = ()
    under_way: Span | None = None
    parent_pid: int | None = None
    group: str | None = None
    at: HotLine | None = None


# --------------------------------------------------------------------------- the run

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Task:
    """One of several `fulltilt run` that a launcher started for one job: one a node, or one a rank.

    ``number`` of ``count``; None where the launcher does not say. ``restart`` counts requeues.
    """

    job: str
    number: int | None = None
    count: int | None = None
    restart: int = 0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One execution of a job. ``state`` says how it ended; ``exit_code`` is the script's own, or minus its signal.

    ``ended_by`` names the exception that ended a run recorded from within, where there is no exit code to tell.
    ``oom_kills`` counts processes that the kernel killed for lack of memory. ``task``: it is one of several tasks of
    the job, each with a folder of its own.
    """

    name: str
    command: tuple[str, ...]
    started_at: str
    machine: Machine
    fulltilt: str
    state: Literal["running", "done", "crashed", "interrupted", "killed"] = "running"
    wall_s: float | None = None
    exit_code: int | None = None
    asked: Settings = field(default_factory=Settings)
    ended_by: str | None = None
    oom_kills: int = 0
    task: Task | None = None
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", mask_arguments(self.command))

    @property
    def began(self) -> datetime:
        """When it started, on the clock of its machine; 1970 where the record is damaged."""
        try:
            return datetime.fromisoformat(self.started_at).astimezone()
        except (ValueError, OSError, OverflowError):
            return datetime.fromtimestamp(0).astimezone()


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder as read, for rules and reports.

    Of a job over several tasks it is the newest attempt; ``earlier`` are those before it (some ranks of each), and
    ``tasks`` the records of its tasks. Their times are shifted so that a step ends at the same time on all of them.
    """

    folder: str
    run: RunRecord
    ranks: tuple[RankRecord, ...]
    spans: tuple[tuple[Span, ...], ...]
    samples: tuple[Sample, ...]
    warnings: tuple[str, ...] = ()
    tasks: tuple[RunRecord, ...] = ()
    earlier: tuple[Run, ...] = ()
