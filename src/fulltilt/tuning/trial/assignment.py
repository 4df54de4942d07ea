"""What a trial's process is told, and what it answers: two small files in the trial's folder."""

from __future__ import annotations

from dataclasses import dataclass, field

from fulltilt.records import Settings
from fulltilt.tuning.trial.throughput import Block, Patience

ASSIGNMENT = "FULLTILT_TRIAL"
ASSIGNMENT_FILE = "assignment.json"
ANSWER_FILE = "answer.json"


@dataclass(frozen=True, slots=True)
class TrainingLoader:
    """Which loader feeds the training, as the first trial saw it: by the user's line and the data set's length."""

    where: str | None
    dataset_len: int | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """The settings to put in force, on which loader, and when to stop; ``folder`` takes the records.

    ``scratch`` is where saves are pointed to where nothing else may be written.
    """

    settings: Settings
    folder: str
    scratch: str | None = None
    loader: TrainingLoader | None = None
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a trial measured. ``complete``: it stopped because it knew enough, not because the script ended.

    ``losses`` go up to the first that is not finite, which is that of step ``not_finite_at``.
    ``passes_overlap``: a pass over a loader went on after another had begun.
    ``learning_rate`` is the one that the optimizer was made with: a schedule may have begun below it.
    """

    blocks: tuple[Block, ...]
    steps: int
    losses: tuple[float, ...]
    world_size: int
    complete: bool
    not_finite_at: int | None = None
    learning_rate: float | None = None
    out_of_memory: int = 0
    remarks: tuple[str, ...] = ()
    passes_overlap: bool = False
