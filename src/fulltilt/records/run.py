"""One execution of a job, and its folder as read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fulltilt.records.job import RankRecord
from fulltilt.records.machine import Machine, Sample, StorageReading
from fulltilt.records.secrets import mask_arguments
from fulltilt.records.spans import Span
from fulltilt.records.tuning import Settings

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One execution of a job. ``state`` says how it ended; ``exit_code`` is the script's own, or minus its signal.

    ``ended_by`` names the exception that ended a run recorded from within, where there is no exit code to tell.
    ``oom_kills`` counts the processes that the kernel killed meanwhile for lack of memory.
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
    data: StorageReading | None = None
    ended_by: str | None = None
    oom_kills: int = 0
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", mask_arguments(self.command))  # nobody can forget it here


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder as read: everything the rules and reports work on."""

    folder: str
    run: RunRecord
    ranks: tuple[RankRecord, ...]
    spans: tuple[tuple[Span, ...], ...]
    samples: tuple[Sample, ...]
    warnings: tuple[str, ...] = ()
