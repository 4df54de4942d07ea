"""A fetch that never came back: no number of workers mends that."""

from __future__ import annotations

from fulltilt.diagnosis.ending import hung_stretch
from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.rules.wording import at, costliest_line, found, time_spent
from fulltilt.figures import seconds
from fulltilt.records import Finding, FindingCode, LoaderRecord


def hung_fetch(evidence: Evidence, loader: LoaderRecord, code: FindingCode) -> Finding | None:
    """The finding for a job that was stopped while it waited in vain; None where other waits were the larger part."""
    hung, wait_s = hung_stretch(evidence.run), evidence.buckets.data_wait_s
    in_vain_s = hung.buckets.data_wait_s if hung is not None else 0.0
    if in_vain_s <= evidence.thresholds.in_vain_share * wait_s:
        return None
    line = costliest_line(evidence)
    facts = [
        time_spent(evidence, "waiting for data", wait_s),
        f"{seconds(in_vain_s)} of it is one wait, from which the job never came back",
    ]
    place = f"{line.call or line.function}{at(line.where)}" if line else f"the loader{at(loader.where)}"
    fix = f"Find out what {place} waited for in vain: a lock, a service, a file system. More workers would wait, too."
    if loader.num_workers:
        fix += " With DataLoader(..., timeout=60) such a wait ends in an error that says so."
    return found(evidence, code, wait_s, facts, fix, line.where if line else loader.where)
