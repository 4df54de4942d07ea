"""A sampler that is slow: it draws the order of the samples in the training thread, with workers as without."""

from __future__ import annotations

from fulltilt.diagnose.evidence import Evidence
from fulltilt.diagnose.gains import by_removing
from fulltilt.diagnose.rules.wording import at, found
from fulltilt.diagnose.words import count, percent
from fulltilt.records import Finding, LoaderRecord


def sampling_share(evidence: Evidence) -> float:
    """How much of the fetching is the sampler's, told by the names of its functions."""
    lines = evidence.workers.lines if evidence.workers else ()
    whole_s = sum(line.seconds for line in lines)
    return sum(line.seconds for line in lines if "Sampler" in line.function) / whole_s if whole_s > 0 else 0.0


def slow_sampler(evidence: Evidence, loader: LoaderRecord, facts: list[str]) -> Finding:
    """The finding for a loader without workers whose sampler takes most of the fetching: workers would not help."""
    wait_s, share = evidence.buckets.data_wait_s, sampling_share(evidence)
    fact = f"{percent(share)} of the fetching is the sampler, in {count('pass', loader.passes)}"
    fix = (
        f"Let the sampler of the loader{at(loader.where)} do less; workers would not take it over. It draws the order "
        "of a whole pass when the pass begins: draw only as many indices as are used (num_samples), make fewer and "
        "longer passes, or keep what does not change from pass to pass."
    )
    predicted = by_removing(share * evidence.active_share(wait_s), evidence.thresholds.recovered_low)
    return found(evidence, "input_serial", wait_s, [*facts, fact], fix, loader.where, predicted)
