"""Settings of a job, and what trying others showed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# Far more workers, or batches in a queue, than pay on any machine. Torch would start all of them, one by one, until the
# memory is gone.
MOST_OF_A_SETTING = 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """The knobs of a job. ``None`` leaves a knob as the job has it."""

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
    """Settings that live tuning tried while the job trained, and what came of it.

    ``expected`` is the range predicted for ``batches_per_s`` before the try. ``began_s`` is a moment of the run.
    """

    settings: Settings
    began_s: float
    outcome: Literal["trying", "kept", "returned", "failed"] = "trying"
    expected: tuple[float, float] | None = None
    batches_per_s: float | None = None
    wait_share: float | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """What live tuning did to one loader of a rank: the settings it found and those it put in force.

    ``cost_s`` is time of the training thread that went into tuning itself. ``note`` is what the user should know of
    other workers, such as that they draw other random numbers.
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


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured try of settings. An out-of-memory trial is a result, not a failure.

    ``settings`` is what was asked for, ``in_force`` what the job then ran with. ``losses`` are those of the first
    steps, one a step; ``cpu_pct`` of 100 is one core.
    """

    settings: Settings
    state: Literal["ok", "oom", "crashed", "timed_out", "diverged", "throttled"]
    samples_per_s: float | None = None
    samples_per_s_low: float | None = None
    samples_per_s_high: float | None = None
    steps: int = 0
    vram_peak_bytes: int | None = None
    ram_peak_bytes: int | None = None
    loss: float | None = None
    note: str | None = None
    purpose: Literal["start", "search", "verify"] = "search"
    in_force: Settings = field(default_factory=Settings)
    data_wait_share: float | None = None
    compute_samples_per_s: float | None = None
    vram_total_bytes: int | None = None
    gpu_util_pct: float | None = None
    cpu_pct: float | None = None
    wall_s: float | None = None
    losses: tuple[float, ...] = ()
    changed_files: tuple[str, ...] = ()
    folder: str | None = None
