"""A sampler that is slow: it draws the order of the samples in the training thread, with workers as without."""

from __future__ import annotations

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.gains import by_removing
from fulltilt.diagnosis.rules.wording import at, found, line_cost, time_spent
from fulltilt.diagnosis.supply import sampling_share
from fulltilt.figures import count, percent
from fulltilt.records import Finding, LoaderRecord


def slow_sampler(evidence: Evidence, loader: LoaderRecord) -> Finding:
    """The finding for a loader whose sampler takes most of the wait: workers would not help."""
    wait_s, share = evidence.buckets.data_wait_s, sampling_share(loader)
    line = max(loader.sampler_lines, key=lambda line: line.seconds)
    facts = [
        time_spent(evidence, "waiting for data", wait_s),
        f"{percent(share)} of it is the sampler, which the training thread runs itself with any number of workers, in "
        f"{count('pass', loader.passes)}",
        f"of the wait, {line_cost(line, loader.wait_s)}",
    ]
    fix = (
        f"Let the sampler of the loader{at(loader.where)} do less; workers would not take it over. Draw only as many "
        "indices as are used (num_samples), make fewer and longer passes, keep what does not change from pass to pass, "
        "or work the order out beforehand."
    )
    where = loader.where if line.where.startswith("torch/") else line.where  # nobody mends torch's own samplers
    predicted = by_removing(share * evidence.active_share(wait_s), evidence.thresholds.recovered_low)
    return found(evidence, "input_serial", wait_s, facts, fix, where, predicted)
