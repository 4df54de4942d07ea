"""From records to an answer: the ledger, the ceilings, the findings and the verdict. Pure functions, no torch."""

from __future__ import annotations

from fulltilt.diagnose.ledger import compare_ranks, make_ledger, mean_step, measure_throughput
from fulltilt.records import Ceilings, Diagnosis, Finding, Run, Verdict

__all__ = ["answer", "diagnose"]


def diagnose(run: Run) -> tuple[Finding, ...]:
    """What holds the run up, ordered by what fixing it would win."""
    return answer(run).findings


def answer(run: Run) -> Diagnosis:
    """Everything that can be said about a run; feeds every surface. Never raises on a run that could be read."""
    return Diagnosis(
        verdict=Verdict("no_steps", 0.0, "Not diagnosed yet."),
        ledger=make_ledger(run),
        throughput=measure_throughput(run),
        ceilings=Ceilings(None, None),
        gpu=(),
        findings=(),
        abstained=(),
        checklist=(),
        settings=(),
        ranks=compare_ranks(run),
        step=mean_step(run),
    )
