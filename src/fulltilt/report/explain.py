"""A recorded run explained: the diagnosis and the page written into its folder."""

from __future__ import annotations

from pathlib import Path

from fulltilt import store
from fulltilt.diagnosis import answer
from fulltilt.records import Diagnosis, Run
from fulltilt.report import page
from fulltilt.report.answer import to_plain


def explain(folder: Path) -> tuple[Run, Diagnosis]:
    """Diagnose the run in ``folder`` and write findings.json and report.html into it. Raises RunFolderError."""
    run = store.load(folder)
    diagnosis = answer(run)
    store.write_json(folder / store.FINDINGS_FILE, to_plain(diagnosis, run))
    page.write(folder / store.REPORT_FILE, [(run, diagnosis)])
    return run, diagnosis
