"""Whether a run's timings are the job's own: a GPU that is slowed down or shared measures something else. Pure."""

from __future__ import annotations

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.figures import percent
from fulltilt.records import GpuSummary


def invalid_because(evidence: Evidence) -> str | None:
    """Why the run is not a valid measurement, in one sentence; None when nothing speaks against it."""
    reasons = (reason for gpu in evidence.gpus for reason in (_slowed_down(gpu, evidence), _shared(gpu)))
    return next((reason for reason in reasons if reason is not None), None)


def _slowed_down(gpu: GpuSummary, evidence: Evidence) -> str | None:
    share = gpu.throttled_share
    if share is None or share < evidence.thresholds.throttled_share:
        return None
    reasons = ", ".join(gpu.throttle_reasons).replace("_", " ") or "reasons unknown"
    return f"GPU {gpu.index} was slowed down in {percent(share)} of the readings ({reasons})"


def _shared(gpu: GpuSummary) -> str | None:
    if not gpu.foreign_processes:
        return None
    first = gpu.foreign_processes[0]
    more = f" and {len(gpu.foreign_processes) - 1} more" if len(gpu.foreign_processes) > 1 else ""
    return f"GPU {gpu.index} was shared with {first.name or 'a process'} (pid {first.pid}){more}"
