"""From records to an answer: the ledger, the ceilings, the findings and the verdict. Pure functions, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fulltilt.diagnosis.checklist import make_checklist, settings_in_force
from fulltilt.diagnosis.evidence import gather, measure_utilisation, without_side_jobs
from fulltilt.diagnosis.findings import ordered
from fulltilt.diagnosis.ledger import mean_gpu_step, mean_step, summarise_job
from fulltilt.diagnosis.rules import judge
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.diagnosis.verdict import reach_verdict, title_of
from fulltilt.figures import pct, percent
from fulltilt.records import Abstention, Buckets, Diagnosis, Finding, Run

__all__ = ["answer", "diagnose", "low_gpu_warning"]


def diagnose(run: Run) -> tuple[Finding, ...]:
    """What holds the run up, ordered by what fixing it would win."""
    return answer(run).findings


def answer(run: Run) -> Diagnosis:
    """Everything that can be said about a run; feeds every surface. Never raises on a run that could be read."""
    run = without_side_jobs(run)
    evidence = gather(run)
    judgements = judge(evidence)
    findings = ordered(judgement for judgement in judgements if isinstance(judgement, Finding))
    verdict = reach_verdict(evidence, findings)
    active = evidence.active_s / evidence.ledger.wall_s if evidence.ledger.wall_s else 0.0
    return Diagnosis(
        verdict=replace(verdict, share=verdict.share * active, share_after_startup=verdict.share),
        ledger=evidence.ledger,
        throughput=evidence.throughput,
        ceilings=evidence.ceilings,
        gpu=evidence.gpus,
        findings=tuple(
            replace(finding, share=finding.share * active, share_after_startup=finding.share, title=title_of(finding))
            for finding in findings
        ),
        abstained=tuple(judgement for judgement in judgements if isinstance(judgement, Abstention)),
        checklist=make_checklist(evidence),
        settings=settings_in_force(evidence),
        ranks=evidence.ranks,
        step=mean_step(run),
        gpu_step=mean_gpu_step(run),
        utilisation=measure_utilisation(evidence),
        invalid_because=evidence.invalid_because,
        job=summarise_job(run, evidence.ledger),
    )


SETTINGS_TO_NAME = ("batch_size", "accumulation", "num_workers", "prefetch_factor", "pin_memory", "precision")


def low_gpu_warning(util_pct: float | None, recent: Buckets, load: Callable[[], Run]) -> tuple[str, ...]:
    """Lines to print while a job runs: the first finding, its fix and the settings in force; empty when all is well.

    ``util_pct`` is the GPU's utilisation; without a GPU it is None and the share of data wait in ``recent`` decides.
    ``load`` reads the run so far.
    """
    active_s = recent.total_s - recent.startup_s
    waits = active_s > 0 and recent.data_wait_s >= THRESHOLDS.severe_share * active_s
    if active_s <= 0 or (not waits if util_pct is None else util_pct >= THRESHOLDS.low_util_pct):
        return ()
    found = answer(load())
    lines = [] if util_pct is None else [f"GPU utilization is low ({pct(util_pct)})"]
    for first in found.findings[:1]:
        lines.append(first.title if util_pct is None else f"- most likely: {first.title}")
        lines.append(f"- it takes {percent(first.share_after_startup)} of the time after start-up. {first.fix}")
    settings = (f"{name} {value}" for name, value in found.settings if name in SETTINGS_TO_NAME and value is not None)
    return (*lines, f"- settings in force: {', '.join(settings)}") if lines else ()
