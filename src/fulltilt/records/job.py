"""What a recorder knows of the job on one rank: its loaders, copies, precision, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fulltilt.records.spans import HotLine, Span
from fulltilt.records.tuning import LiveRecord


@dataclass(frozen=True, slots=True)
class LoaderRecord:
    """A DataLoader as it was constructed and as it was used by one rank.

    ``where`` is the user's line; ``made_by`` is the library that this line calls to construct the loader, or None
    when the line constructs it itself. What the script draws batches from without any DataLoader is made by "script".
    A line that constructs one again for each pass is one loader, ``constructed`` as many times. ``eval_batches`` of its
    batches were drawn to evaluate. ``sampler_lines`` are those of its sampler, which the training thread runs itself,
    with workers as without.
    """

    loader_id: int
    role: Literal["train", "eval", "unused"]
    where: str | None
    dataset: str
    dataset_len: int | None
    iterable: bool
    batch_size: int | None
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    drop_last: bool
    shuffle: bool | None
    sampler: str | None
    collate: str | None
    start_method: str | None
    given: tuple[str, ...] = ()
    made_by: str | None = None
    constructed: int = 1
    passes: int = 0
    batches: int = 0
    samples: int | None = None
    batch_bytes: int | None = None
    batch_kind: str | None = None
    wait_s: float = 0.0
    wait_cpu_s: float = 0.0
    first_wait_s: float = 0.0
    restart_s: float = 0.0
    padding_share: float | None = None
    eval_batches: int = 0
    sampler_lines: tuple[HotLine, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """All workers of one loader on one rank together: what they did and which lines cost it."""

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


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """Memory by part, asked for once at the end of an early step. ``other_bytes`` is all else that stays on the GPU:

    frozen weights, buffers, data kept there; None for a job on the CPU.
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
    blocked_s: float
    pageable_share: float | None
    blocking_share: float | None
    where: str | None


@dataclass(frozen=True, slots=True)
class PrecisionRecord:
    """What arithmetic the job used, as far as it could be seen."""

    autocast: str | None
    parameters: str | None
    tf32: bool | None
    scaler: bool
    compiled: bool


@dataclass(frozen=True, slots=True)
class CommunicationRecord:
    """Gradient exchange as DistributedDataParallel measured it, per step."""

    backward_s: float | None
    communication_s: float | None
    overlapped_s: float | None
    source: str


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
class RankRecord:
    """What one rank's recorder knows besides its spans. Rewritten atomically while the job runs.

    ``under_way`` is what has passed since the last step: the last that is known of a job that hangs and is killed.
    """

    rank: int
    world_size: int
    local_rank: int
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
    sync_lines: tuple[HotLine, ...] = ()
    checkpoint_lines: tuple[HotLine, ...] = ()
    syncs: int = 0
    sync_blocked_s: float = 0.0
    transfer: TransferRecord | None = None
    precision: PrecisionRecord | None = None
    communication: CommunicationRecord | None = None
    deep: DeepRecord | None = None
    gpu_busy_step_s: float | None = None
    launch_s: float | None = None
    vram_peak_bytes: int | None = None
    vram_reserved_bytes: int | None = None
    alloc_retries: int | None = None
    memory: MemoryRecord | None = None
    torch_threads: int | None = None
    stack_samples: int = 0
    observer_s: float | None = None
    notes: tuple[str, ...] = ()
    live: tuple[LiveRecord, ...] = ()
    under_way: Span | None = None
    parent_pid: int | None = None
    worker_messages_dropped: int = 0
