"""The JSON answer, whose keys are stable, and the results of a run folder: findings.json and report.html."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.diagnosis import answer
from fulltilt.records import Diagnosis, Run
from fulltilt.report import page


def to_plain(diagnosis: Diagnosis, run: Run | None = None) -> dict[str, Any]:
    """The diagnosis as plain JSON values, with every key, and its run. None was not measured."""
    plain: dict[str, Any] = store.encode(diagnosis, fully=True)
    plain["settings"] = dict(plain["settings"])
    if diagnosis.job is not None:
        plain["job"]["rest"] = dict(plain["job"]["rest"])
    return plain | {"run": None if run is None else _identity(run)}


def _identity(run: Run) -> dict[str, Any]:
    record = run.run
    return {
        "folder": run.folder,
        "name": record.name,
        "command": list(record.command),
        "started_at": record.started_at,
        "state": record.state,
        "exit_code": record.exit_code,
        "ranks": len(run.ranks),
        "warnings": list(run.warnings),
    }


def explain(folder: Path) -> tuple[Run, Diagnosis]:
    """Diagnose the run in ``folder`` and write findings.json and report.html into it. Raises RunFolderError."""
    run = store.load(folder)
    diagnosis = answer(run)
    store.write_json(folder / store.FINDINGS_FILE, to_plain(diagnosis, run))
    page.write(folder / store.REPORT_FILE, [(run, diagnosis)])
    return run, diagnosis
