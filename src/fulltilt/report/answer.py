"""The JSON answer, whose keys other programs may rely on, and a run folder explained: findings.json and report.html."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.diagnosis import answer
from fulltilt.records import SCHEMA_VERSION, Diagnosis, Run
from fulltilt.report import page
from fulltilt.store import encode_fully

# --------------------------------------------------------------------------- answer


def to_plain(diagnosis: Diagnosis, run: Run | None = None) -> dict[str, Any]:
    """The diagnosis as plain JSON values. Every key is always there; what was not measured is None.

    With ``run``, the answer also says which run it is about and whether it has ended.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": encode_fully(diagnosis.verdict),
        "ledger": encode_fully(diagnosis.ledger),
        "throughput": encode_fully(diagnosis.throughput),
        "ceilings": encode_fully(diagnosis.ceilings),
        "gpu": encode_fully(diagnosis.gpu),
        "findings": encode_fully(diagnosis.findings),
        "settings": {name: encode_fully(value) for name, value in diagnosis.settings},
        "checklist": encode_fully(diagnosis.checklist),
        "abstained": encode_fully(diagnosis.abstained),
        "ranks": encode_fully(diagnosis.ranks),
        "step": encode_fully(diagnosis.step),
        "gpu_step": encode_fully(diagnosis.gpu_step),
        "invalid_because": diagnosis.invalid_because,
        "run": None if run is None else _identity(run),
    }


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


# --------------------------------------------------------------------------- explain


def explain(folder: Path) -> tuple[Run, Diagnosis]:
    """Diagnose the run in ``folder`` and write findings.json and report.html into it. Raises RunFolderError."""
    run = store.load(folder)
    diagnosis = answer(run)
    store.write_json(folder / store.FINDINGS_FILE, to_plain(diagnosis, run))
    page.write(folder / store.REPORT_FILE, [(run, diagnosis)])
    return run, diagnosis
