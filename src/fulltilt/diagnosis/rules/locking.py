"""Workers that wait for one another at a lock: more of them would only make the queue longer."""

from __future__ import annotations

import re

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.gains import amdahl, gain
from fulltilt.diagnosis.rules.wording import at, found, line_cost, time_spent
from fulltilt.figures import count
from fulltilt.records import Finding, FindingCode, HotLine, LoaderRecord

# Where nothing but the source tells: calls into C, and libraries that sleep until a file is free.
_LOCKS = re.compile(r"\.acquire\(|\b(flock|lockf)\(|^with \S*lock", re.IGNORECASE)


def contended_lock(evidence: Evidence, loader: LoaderRecord, code: FindingCode) -> Finding | None:
    """The finding for workers of which only one at a time can go on; None where they seldom wait for a lock."""
    workers, limits = evidence.workers, evidence.thresholds
    lines = [line for line in workers.lines if _is_a_lock(line)] if workers else []
    line = max(lines, key=lambda line: line.seconds, default=None)
    if workers is None or line is None or line.seconds < limits.contended_share * workers.fetch_s:
        return None
    wait_s = evidence.buckets.data_wait_s
    facts = [
        time_spent(evidence, "waiting for data", wait_s),
        f"of the workers' fetching, {line_cost(line, workers.fetch_s)}: there they wait for a lock",
    ]
    fix = (
        f"{line.call}{at(line.where)} lets one process at a time through: {count('worker', loader.num_workers)} "
        "and more would queue there. Hold the lock only for what has to be alone, "
        "or give each worker a file, a handle or a connection of its own."
    )
    part = min(line.seconds / workers.fetch_s, 1.0)
    unhindered = amdahl(evidence.active_share(wait_s))
    predicted = gain(amdahl(part * limits.recovered_low), amdahl(part), cap=unhindered)
    return found(evidence, code, wait_s, facts, fix, line.where, predicted)


def _is_a_lock(line: HotLine) -> bool:
    call = line.call or ""
    return (line.waits and call.startswith("with ")) or bool(_LOCKS.search(call))
