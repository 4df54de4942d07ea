"""Where the time of a run went."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fulltilt.records.secrets import mask_text


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
        return float(sum(getattr(self, name) for name in BUCKETS))

    def plus(self, other: Buckets) -> Buckets:
        """Both together."""
        return Buckets(*(getattr(self, name) + getattr(other, name) for name in BUCKETS))


BUCKETS: tuple[str, ...] = tuple(f.name for f in fields(Buckets))


@dataclass(frozen=True, slots=True)
class Phases:
    """Host time of the parts of a step and what the GPU did meanwhile: one step, drawn to scale.

    Like the buckets beside them, these are sums over all steps of the span.
    """

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
    """A stretch of a rank's wall time with ``steps`` optimizer steps in it (0 for time outside steps).

    The spans of a rank tile its life from ``t0_s`` of the first to ``t1_s`` of the last, so that the ledger
    closes. Early spans hold one step; later ones hold many, so that a million steps stay small.
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
    step_max_s: float | None = None
    data_wait_max_s: float | None = None
    phases: Phases | None = None


@dataclass(frozen=True, slots=True)
class HotLine:
    """A line of code and the time it cost. ``where`` is ``file:line``, ``call`` the expression."""

    where: str
    function: str
    seconds: float
    call: str | None = None
    waits: bool = False  # for another thread or process

    def __post_init__(self) -> None:
        if self.call is not None:
            object.__setattr__(self, "call", mask_text(self.call))
