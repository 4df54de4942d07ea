"""A job with all its attempts: its goodput, the share of its time that went into training steps, and who is missing."""

from __future__ import annotations

from datetime import datetime
from itertools import islice

from fulltilt.diagnosis.ledger import make_ledger, sum_buckets
from fulltilt.records import JobSummary, Ledger, Run

# Ranks without a record that are listed at most.
MOST_MISSING = 10_000
# What of an attempt is no training step, and how it is called.
_NO_STEPS = {
    "startup_s": "start-up",
    "validation_s": "validation",
    "checkpoint_s": "checkpoints",
    "epoch_turnover_s": "starting passes",
    "unattributed_s": "not seen",
}


def summarise_job(run: Run, ledger: Ledger) -> JobSummary | None:
    """The job with all its attempts, of which ``ledger`` is the newest's; None for a run that is no task of one."""
    if run.run.task is None:
        return None
    ledgers = [*(make_ledger(attempt) for attempt in run.earlier), ledger]
    wall_s = sum(ledger.wall_s for ledger in ledgers)
    elapsed_s = max(_seconds_between(run.earlier[0] if run.earlier else run, run) + ledgers[-1].wall_s, wall_s)
    total = sum_buckets(ledger.buckets for ledger in ledgers)
    rest = {"between attempts": elapsed_s - wall_s} | {told: getattr(total, name) for name, told in _NO_STEPS.items()}
    world_size, there = max((rank.world_size for rank in run.ranks), default=0), {rank.rank for rank in run.ranks}
    return JobSummary(
        job=run.run.task.job,
        tasks=len(run.tasks),
        hosts=tuple(dict.fromkeys(task.machine.hostname for task in run.tasks)),
        attempts=len(ledgers),
        elapsed_s=elapsed_s,
        goodput=max(elapsed_s - sum(rest.values()), 0.0) / elapsed_s if elapsed_s > 0 else 0.0,
        rest=tuple((told, length_s) for told, length_s in rest.items() if length_s > 0),
        missing_ranks=tuple(islice((rank for rank in range(world_size) if rank not in there), MOST_MISSING)),
    )


def _seconds_between(first: Run, last: Run) -> float:
    try:
        began = [datetime.fromisoformat(run.run.started_at).astimezone() for run in (first, last)]
    except (ValueError, OSError, OverflowError):
        return 0.0
    return max((began[1] - began[0]).total_seconds(), 0.0)
