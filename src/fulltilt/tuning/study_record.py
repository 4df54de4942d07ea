"""What is studied: the command, and what its first trial told about its loader and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fulltilt.diagnosis.evidence import gather
from fulltilt.diagnosis.thresholds import DEFAULT
from fulltilt.records import SCHEMA_VERSION, LoaderRecord, Run
from fulltilt.records.secrets import mask_arguments
from fulltilt.tuning.assignment import Answer, TrainingLoader
from fulltilt.tuning.epoch_changes import changes_data_set
from fulltilt.tuning.source_patch import fingerprint, source_file

STUDY_FILE = "study.json"


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """What is studied, and what the first trial told about it.

    ``source_sha256`` is of the file with the loader, ``script_sha256`` of the script that the command names,
    ``data_set_changes`` the line beside the loader that changes the data set from epoch to epoch.
    """

    command: tuple[str, ...]
    working_folder: str
    allow: tuple[str, ...]
    started_at: str
    loader: LoaderRecord | None = None
    source_sha256: str | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    data_set_changes: int | None = None
    script_sha256: str | None = None
    passes_overlap: bool = False
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", mask_arguments(self.command))


def learned(record: StudyRecord, run: Run, answer: Answer | None, arguments: Sequence[str]) -> StudyRecord:
    """The record with what the first trial tells about the job: its loader and its optimizer."""
    evidence = gather(run, DEFAULT)
    rank = evidence.rank
    return replace(
        record,
        loader=evidence.loader,
        source_sha256=_fingerprint(evidence.loader.where if evidence.loader else None, arguments),
        script_sha256=fingerprint(Path(_script(arguments))),
        data_set_changes=_data_set_changes(evidence.loader, arguments),
        optimizer=rank.optimizers[0] if rank is not None and rank.optimizers else None,
        learning_rate=answer.learning_rate if answer is not None else None,
        passes_overlap=answer is not None and answer.passes_overlap,
    )


def changed_file(record: StudyRecord, arguments: Sequence[str]) -> str | None:
    """The script, or the file that makes its loader, if it is not as it was at the first trial."""
    where = record.loader.where if record.loader is not None else None
    script = _script(arguments)
    for file, then, now in (
        ((where or "").rpartition(":")[0], record.source_sha256, _fingerprint(where, arguments)),
        (script, record.script_sha256, fingerprint(Path(script))),
    ):
        if then is not None and now != then:
            return file
    return None


def identity(loader: LoaderRecord | None) -> TrainingLoader | None:
    """How a trial knows the loader that is studied."""
    return None if loader is None else TrainingLoader(loader.where, loader.dataset_len)


def _fingerprint(where: str | None, arguments: Sequence[str]) -> str | None:
    """Of the file in which the loader is made: a diff is only applied to the text that was studied."""
    return None if where is None else fingerprint(source_file(where, Path(), arguments))


def _script(arguments: Sequence[str]) -> str:
    """The script that a command names; empty where it names none."""
    return next((argument for argument in arguments if argument.endswith(".py")), "")


def _data_set_changes(loader: LoaderRecord | None, arguments: Sequence[str]) -> int | None:
    if loader is None or loader.where is None:
        return None
    try:
        return changes_data_set(source_file(loader.where, Path(), arguments).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
